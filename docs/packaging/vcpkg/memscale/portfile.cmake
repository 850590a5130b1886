# An overlay port: its sources are those of the checkout that it is in.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)

set(VCPKG_BUILD_TYPE release) # the package has no binaries
vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}/docs/packaging"
    OPTIONS "-DMEMSCALE_CMAKE_DIR=share/${PORT}"
)
vcpkg_cmake_install()
vcpkg_fixup_pkgconfig()

file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
