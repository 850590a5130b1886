# The targets of memscale.h, which is in memscale_INCLUDE_DIR. They exist once in a build.
#
#   memscale::header    the include path alone. One source file of yours defines MEMSCALE_IMPLEMENTATION, and
#                       the program links libm and Threads::Threads
#   memscale::memscale  the implementation too: a static library that is compiled in your build, by your compiler
#                       and with your flags, if something links it. Its own name is memscale:
#                       target_compile_definitions(memscale PRIVATE MEMSCALE_CBLAS)
#   memscale::cuda      what nvcc compiles, where the language CUDA is enabled: ms_backend_cuda, with cuBLAS. Its
#                       own name is memscale_cuda
cmake_policy(VERSION 3.15...3.31)

if(NOT TARGET memscale::header)
    add_library(memscale::header INTERFACE IMPORTED GLOBAL)
    set_target_properties(memscale::header PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${memscale_INCLUDE_DIR}")
endif()

if(NOT TARGET memscale::memscale AND (CMAKE_C_COMPILER_LOADED OR CMAKE_CXX_COMPILER_LOADED))
    add_library(memscale STATIC EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/memscale.c")
    add_library(memscale::memscale ALIAS memscale)
    set_target_properties(memscale PROPERTIES POSITION_INDEPENDENT_CODE ON)
    if(CMAKE_C_COMPILER_LOADED)
        target_compile_features(memscale PRIVATE c_std_99)
    else() # the text is C++ too
        set_source_files_properties("${CMAKE_CURRENT_LIST_DIR}/memscale.c" PROPERTIES LANGUAGE CXX)
        target_compile_features(memscale PRIVATE cxx_std_11)
    endif()
    find_package(Threads REQUIRED)
    target_link_libraries(memscale PUBLIC memscale::header Threads::Threads)
    if(NOT WIN32)
        target_link_libraries(memscale PUBLIC m)
    endif()
endif()

if(NOT TARGET memscale::cuda AND CMAKE_CUDA_COMPILER_LOADED)
    find_package(CUDAToolkit REQUIRED)
    add_library(memscale_cuda STATIC EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/memscale_cuda.cu")
    add_library(memscale::cuda ALIAS memscale_cuda)
    set_target_properties(memscale_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_compile_features(memscale_cuda PRIVATE cuda_std_17)
    target_link_libraries(memscale_cuda PUBLIC memscale::header CUDA::cublas)
endif()
