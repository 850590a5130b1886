import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir

required_conan_version = ">=2.0"


class MemscaleConan(ConanFile):
    name = "memscale"
    description = "Plans and executes the memory of training, in one C header"
    license = "MIT"
    topics = ("training", "memory", "checkpointing", "offloading", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _checkout(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        header = load(self, os.path.join(self._checkout, "memscale.h"))
        found = re.findall(r"^#define MEMSCALE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.MULTILINE)
        self.version = ".".join(found)

    def export_sources(self):
        for pattern in ("memscale.h", "LICENSE", "docs/packaging/CMakeLists.txt", "docs/packaging/memscale*"):
            copy(self, pattern, self._checkout, self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def package_id(self):
        self.info.clear()  # it has no binaries: one package for all settings

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.generate()

    def build(self):
        CMake(self).configure(build_script_folder="docs/packaging")

    def package(self):
        CMake(self).install()
        rmdir(self, os.path.join(self.package_folder, "share", "pkgconfig"))  # PkgConfigDeps makes its own
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # CMake finds the package of memscale.h itself, with memscale::header, memscale::memscale, memscale::cuda.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "memscale")]
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        # For all others, which define MEMSCALE_IMPLEMENTATION in a source file of their own.
        if self.settings.get_safe("os") != "Windows":
            self.cpp_info.system_libs = ["m", "pthread"]
