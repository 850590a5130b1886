# Stand-ins for the functions of vcpkg that docs/packaging/vcpkg calls, with their arguments checked: run by
# tests/packaging.sh with cmake -P. PORTFILE is the port, and PORT, VERSION, CURRENT_PACKAGES_DIR and
# CURRENT_BUILDTREES_DIR are what vcpkg sets.
cmake_minimum_required(VERSION 3.15)

function(run)
    execute_process(COMMAND ${ARGV} RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "failed: ${ARGV}")
    endif()
endfunction()

function(vcpkg_cmake_configure)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
    if(DEFINED arg_UNPARSED_ARGUMENTS OR NOT VCPKG_BUILD_TYPE STREQUAL "release")
        message(FATAL_ERROR "vcpkg_cmake_configure(${ARGV}), VCPKG_BUILD_TYPE ${VCPKG_BUILD_TYPE}")
    endif()
    run("${CMAKE_COMMAND}" -S "${arg_SOURCE_PATH}" -B "${CURRENT_BUILDTREES_DIR}/rel"
        "-DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}" -DCMAKE_BUILD_TYPE=Release
        -DCMAKE_ERROR_ON_ABSOLUTE_INSTALL_DESTINATION=ON ${arg_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
    run("${CMAKE_COMMAND}" --build "${CURRENT_BUILDTREES_DIR}/rel" --target install)
endfunction()

function(vcpkg_fixup_pkgconfig)
    file(GLOB_RECURSE files "${CURRENT_PACKAGES_DIR}/*.pc")
    list(LENGTH files count)
    if(NOT count EQUAL 1)
        message(FATAL_ERROR "files of pkg-config: ${files}")
    endif()
endfunction()

function(vcpkg_install_copyright)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
    if(DEFINED arg_UNPARSED_ARGUMENTS OR NOT EXISTS "${arg_FILE_LIST}")
        message(FATAL_ERROR "vcpkg_install_copyright(${ARGV})")
    endif()
    file(INSTALL "${arg_FILE_LIST}" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}" RENAME copyright)
endfunction()

include("${PORTFILE}")
