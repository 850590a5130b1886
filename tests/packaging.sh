#!/usr/bin/env bash
# packaging.sh CHECK: what docs/packaging installs, and programs that use it in each of the ways of its page,
# whose text is what is built here. Each check is a function check_CHECK below. Status 77: something that it
# needs is missing, which the last line names.
set -u
cd "$(dirname "$0")/.."
root=$PWD
page=$root/docs/packaging/README.md
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
unset PKG_CONFIG_PATH CMAKE_PREFIX_PATH DESTDIR PREFIX

need() { # COMMAND...
    local command
    for command in "$@"; do
        command -v "$command" > /dev/null || { echo "no $command"; exit 77; }
    done
}

need_cmake() { # ranges of versions, which are tested, are new in 3.19
    need cmake
    cmake --version | awk 'NR == 1 { split($3, v, "."); exit v[1] * 1000 + v[2] < 3019 }' ||
        { echo "$(cmake --version | head -n 1), not 3.19 or newer"; exit 77; }
}

fail() {
    printf '%s\n' "$@"
    exit 1
}

# The number of the version that the header has, up to this part of it.
version_of() { # PART
    awk -v last="$1" '/^#define MEMSCALE_VERSION_(MAJOR|MINOR|PATCH) / && !over {
        printf "%s%s", dot, $3; dot = "."; over = $2 == "MEMSCALE_VERSION_" last }' memscale.h
}
version=$(version_of PATCH)

# The first block of the page in this language that has the text.
snippet() { # LANGUAGE TEXT
    local block
    block=$(awk -v fence="\`\`\`$1" -v text="$2" '
        inside && /^```/ { if (index(block, text)) { printf "%s", block; exit } inside = 0 }
        inside { block = block $0 "\n" }
        $0 == fence { inside = 1; block = "" }' $page)
    [ -n "$block" ] || { echo "$page has no block of $1 with $2" >&2; return 1; }
    printf '%s\n' "$block"
}

# A folder with the sources that the page speaks of; main.c trains one param.
program() { # FOLDER [FLAGS OF THE PREPROCESSOR]
    mkdir -p "$1" && { [ -z "${2-}" ] || echo "#define $2"; cat tests/compile_program.c; } > "$1/main.c" &&
        snippet c MEMSCALE_IMPLEMENTATION > "$1/memscale.c" &&
        snippet cuda MEMSCALE_CUDA_IMPLEMENTATION > "$1/memscale_cuda.cu" || exit 1
}

quietly() { # COMMAND: what it prints is for those who look for a mistake
    "$@" > "$out/log" 2>&1 || fail "$*" "$(tail -n 30 "$out/log")"
}

install_to() { # PREFIX
    quietly ${MAKE:-make} -s install PREFIX="$1"
}

# Configures the text of a CMakeLists.txt, builds it, and runs what is then there as trainer.
cmake_program() { # FOLDER TEXT ARGUMENTS
    [ -f "$1/main.c" ] || program "$1"
    printf '%s\n' "$2" > "$1/CMakeLists.txt"
    quietly cmake -S "$1" -B "$1/the build" "${@:3}"
    quietly cmake --build "$1/the build"
    [ ! -x "$1/the build/trainer" ] || quietly "$1/the build/trainer"
}

listing() { # FOLDER: its files, each with the sum of its bytes
    (cd "$1" && find . -type f -exec md5sum {} + | sort -k 2)
}

# ---- checks --------------------------------------------------------------------------------------

# What repeats the version agrees with the header, and so does a tag of this commit; and what README.md shows
# is on the page, which is what is tested.
check_versions() {
    local wrong tag minor found
    minor=$(version_of MINOR)
    found=$(sed -n 's/^  "version": "\(.*\)",$/\1/p' docs/packaging/vcpkg/memscale/vcpkg.json)
    [ "$found" = "$version" ] || fail "vcpkg.json has version $found, memscale.h $version"
    grep -q "^/\*  memscale.h - v$version - " memscale.h || fail "the first line of memscale.h has not v$version"
    wrong=$(grep -nE 'find_package\(memscale [0-9]|(GIT_TAG|tag -a) v[0-9]|memscale/\[' README.md docs/*.md $page |
        grep -vE "find_package\(memscale $minor |(GIT_TAG|tag -a) v$version( |$)|memscale/\[>=$minor <")
    [ -z "$wrong" ] || fail "memscale.h has version $version, but:" "$wrong"
    [ "$(grep -c 'find_package(memscale [0-9]' $page)" -ge 4 ] || fail "$page shows no versions"
    while read -r found; do
        grep -qxF "$found" $page || fail "README.md installs by a line that $page has not: $found"
    done < <(awk '/^## / { here = $0 == "## Installing" } /^```/ { inside = !inside; next } here && inside' README.md)
    for tag in $(git tag --points-at HEAD 'v*' 2> /dev/null); do
        [ "$tag" = "v$version" ] || fail "the commit has the tag $tag, memscale.h version $version"
    done
}

# What is installed where, and removed again. All of it is text, without templates that nobody has filled in.
check_install() {
    local tree="$out/a tree"
    quietly ${MAKE:-make} -s install DESTDIR="$tree" PREFIX='/opt/the prefix'
    [ "$(cd "$tree" && find . -type f | sort)" = "$(printf './opt/the prefix/%s\n' include/memscale.h \
        share/cmake/memscale/memscale{-config-version.cmake,-config.cmake,-targets.cmake,.c,_cuda.cu} \
        share/pkgconfig/memscale.pc)" ] || fail 'other files than expected:' "$(find "$tree" -type f)"
    cmp memscale.h "$tree/opt/the prefix/include/memscale.h" || exit 1
    ! grep -rn '@[a-z_]*@' "$tree" --include='*.cmake' --include='*.pc' || exit 1
    ! grep -rn "$tree" "$tree" || fail 'files name DESTDIR'
    [ -z "$(find "$tree" -type f ! -perm 644)" ] || fail 'files that not all may read'
    touch "$tree/opt/the prefix/include/other.h"
    quietly ${MAKE:-make} -s uninstall DESTDIR="$tree" PREFIX='/opt/the prefix'
    [ "$(cd "$tree" && find . -type f)" = './opt/the prefix/include/other.h' ] || fail 'left, or lost:' "$(find "$tree" -type f)"
    [ ! -e "$tree/opt/the prefix/share/cmake/memscale" ] || fail 'an empty folder is left'
    ! ${MAKE:-make} -s install PREFIX=relative > "$out/log" 2>&1 && grep -q '"relative" is no absolute path' "$out/log" &&
        [ ! -e relative ] && [ ! -e docs/packaging/relative ] || fail 'a relative PREFIX is not refused' "$(cat "$out/log")"

    # Directories elsewhere: the files name them as they are.
    quietly ${MAKE:-make} -s install DESTDIR="$out/elsewhere" prefix=/usr includedir=/other/include \
        pkgconfigdir=/usr/lib/pkgconfig cmakedir=/usr/lib/cmake/memscale
    grep -qx 'includedir=/other/include' "$out/elsewhere/usr/lib/pkgconfig/memscale.pc" &&
        grep -q '"/other/include" ABSOLUTE' "$out/elsewhere/usr/lib/cmake/memscale/memscale-config.cmake" || exit 1

    # CMake installs the same.
    need cmake
    install_to "$out/one place"
    quietly cmake -S docs/packaging -B "$out/a build" -DCMAKE_INSTALL_PREFIX="$out/nowhere"
    quietly cmake --install "$out/a build" --prefix "$out/one place.cmake"
    sed -i 's/one place\.cmake/one place/' "$out/one place.cmake/share/pkgconfig/memscale.pc"
    diff <(listing "$out/one place") <(listing "$out/one place.cmake") && [ ! -e "$out/nowhere" ] || exit 1
}

check_pkgconfig() {
    local flags
    need pkg-config
    export HOME=$out CFLAGS=-O0
    program "$out/program"
    quietly bash -ec "$(snippet sh 'make install')"
    (cd "$out/program" && quietly bash -ec "$(snippet sh 'export PKG_CONFIG_PATH')" && quietly ./trainer) || exit 1

    # In a folder whose name has spaces; and as C++.
    install_to "$out/a prefix"
    export PKG_CONFIG_PATH="$out/a prefix/share/pkgconfig"
    [ "$(pkg-config --modversion memscale)" = "$version" ] || fail "$(pkg-config --modversion memscale)"
    flags=$(pkg-config --cflags --libs memscale)
    (cd "$out/program" && rm trainer && quietly eval "${CC:-cc} -o trainer main.c memscale.c $flags" && quietly ./trainer) || exit 1
    need "${CXX:-g++}"
    (cd "$out/program" && rm trainer && quietly eval "${CXX:-g++} -x c++ -o trainer main.c memscale.c $flags" && quietly ./trainer)
}

check_cmake() {
    local prefix="$out/a prefix" text other
    need_cmake
    install_to "$prefix"
    cmake_program "$out/compiled program" "$(snippet cmake 'target_link_libraries(trainer PRIVATE memscale::memscale)')" \
        -DCMAKE_PREFIX_PATH="$prefix"
    [ -f "$out/compiled program/the build/libmemscale.a" ] || exit 1
    text=$(snippet cmake 'install(EXPORT')
    cmake_program "$out/library" "$text" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_INSTALL_PREFIX="$out/library/installed"
    [ ! -e "$out/library/the build/libmemscale.a" ] || fail 'compiled, though nothing links it'
    quietly cmake --install "$out/library/the build"
    grep -q memscale::header "$out/library/installed/lib/cmake/trainer/trainer.cmake" || exit 1

    # What comes from a checkout.
    program "$out/sub program"
    ln -s "$root" "$out/sub program/memscale"
    cmake_program "$out/sub program" "$(snippet cmake 'add_subdirectory(memscale')
        add_library(header OBJECT memscale.c)
        target_link_libraries(header PRIVATE memscale::header)"
    cmake_program "$out/fetched" "$(snippet cmake FetchContent_MakeAvailable)" -DFETCHCONTENT_SOURCE_DIR_MEMSCALE="$root"

    # C++ alone; one package, found in one folder and used in another, in a shared library too.
    program "$out/twice"
    mkdir "$out/twice/one" "$out/twice/two"
    echo "find_package(memscale $version EXACT REQUIRED)" | tee "$out/twice/one/CMakeLists.txt" > "$out/twice/two/CMakeLists.txt"
    mv "$out/twice/main.c" "$out/twice/main.cpp" && touch "$out/twice/main.c"
    cmake_program "$out/twice" 'cmake_minimum_required(VERSION 3.15)
        project(trainer LANGUAGES CXX)
        add_subdirectory(one)
        add_subdirectory(two)
        add_library(shared SHARED main.cpp)
        target_link_libraries(shared PRIVATE memscale::memscale)
        add_executable(trainer main.cpp)
        target_link_libraries(trainer PRIVATE memscale::memscale)' -DCMAKE_PREFIX_PATH="$prefix"

    # Which versions are found, and that there is no cuda without nvcc.
    IFS=. read -r major minor patch <<< "$version"
    [ "$major" -eq 0 ] && other="no:0.$((minor + 1)) no:0.$((minor - 1)) no:0" || other="yes:$major no:$((major - 1))"
    for text in yes:$version yes:$major.$minor yes:$major.0...$((major + 1)) "yes:0.1...$version" "no:0.1...<$version" \
        no:$major.$minor.$((patch + 1)) no:$((major + 1)) no:$((major + 1))...$((major + 2)) $other; do
        echo "find_package(memscale ${text#*:} QUIET CONFIG)
            if(memscale_FOUND STREQUAL $([ ${text%%:*} = yes ] && echo 0 || echo 1))
                message(SEND_ERROR \"find_package(memscale ${text#*:}) should be ${text%%:*}\")
            endif()
            unset(memscale_DIR CACHE)"
    done > "$out/versions.cmake"
    cmake_program "$out/versions" "cmake_minimum_required(VERSION 3.19)
        project(trainer LANGUAGES NONE)
        include(\"$out/versions.cmake\")" -DCMAKE_PREFIX_PATH="$prefix"
    mkdir "$out/no cuda"
    snippet cmake 'COMPONENTS cuda' | sed 's/ CUDA)/)/' > "$out/no cuda/CMakeLists.txt"
    ! cmake -S "$out/no cuda" -B "$out/no cuda/b" -DCMAKE_PREFIX_PATH="$prefix" > "$out/log" 2>&1 &&
        tr -s ' \n' ' ' < "$out/log" | grep -q 'no target memscale::cuda.* LANGUAGES C CUDA' || fail "$(cat "$out/log")"
}

# With cblas_sgemm in the place of the built-in product.
check_cblas() {
    need cmake
    [ -n "${CBLAS-}" ] || { echo 'no CBLAS'; exit 77; }
    install_to "$out/a prefix"
    cmake_program "$out/blas" "$(snippet cmake MEMSCALE_CBLAS)" -DCMAKE_PREFIX_PATH="$out/a prefix"
    nm "$out/blas/the build/libmemscale.a" 2> /dev/null | grep -q 'U cblas_sgemm' || fail 'cblas_sgemm is not used'
}

# nvcc's part, compiled and linked; the program is refused a device that no machine has.
check_cuda() {
    local home
    [ -n "${NVCC-}" ] || { echo 'no nvcc'; exit 77; }
    home=$(dirname "$(dirname "$(realpath "$NVCC")")")
    export HOME=$out CFLAGS=-O0 NVCCFLAGS=-O0 PATH=$PATH:$home/bin LD_LIBRARY_PATH=$home/lib64
    program "$out/program" COMPILE_CUDA
    if command -v pkg-config > /dev/null; then
        install_to "$out/prefix"
        export PKG_CONFIG_PATH="$out/prefix/share/pkgconfig"
        (cd "$out/program" && quietly bash -ec "$(snippet sh 'nvcc ' | sed "s|/usr/local/cuda/|$home/|")" && quietly ./trainer) || exit 1
    fi
    need cmake pkg-config
    install_to "$out/a prefix"
    cmake_program "$out/program" "$(snippet cmake 'COMPONENTS cuda')" -DCMAKE_PREFIX_PATH="$out/a prefix" \
        -DCMAKE_CUDA_COMPILER="$NVCC" -DCMAKE_CUDA_ARCHITECTURES=75 -DCMAKE_CUDA_FLAGS=-O0
}

# The port, by stand-ins for the functions of vcpkg; and a program on what it has installed.
check_vcpkg() {
    local packages="$out/the packages" port=docs/packaging/vcpkg/memscale file
    need cmake
    quietly cmake -DPORT=memscale -DVERSION="$version" -DCURRENT_PACKAGES_DIR="$packages" \
        -DCURRENT_BUILDTREES_DIR="$out/trees" -DPORTFILE="$root/$port/portfile.cmake" -P tests/vcpkg_functions.cmake
    for file in include/memscale.h share/memscale/{copyright,usage,memscale-config.cmake} share/pkgconfig/memscale.pc; do
        [ -s "$packages/$file" ] || fail "not installed: $file" "$(find "$packages")"
    done
    [ "$(find "$packages" -type f | wc -l)" -eq 9 ] && [ ! -e "$packages/debug" ] && [ ! -e "$packages/lib" ] ||
        fail "$(find "$packages")"
    ! grep -rn "$out" "$packages" --include='*.cmake' || fail 'paths of the machine that built it'
    cmake_program "$out/program" "$(snippet cmake 'target_link_libraries(trainer PRIVATE memscale::memscale)')" \
        -DCMAKE_PREFIX_PATH="$packages"
    # What its page tells a user is right as far as CMake goes.
    cmake_program "$out/usage" "cmake_minimum_required(VERSION 3.15)
        project(trainer LANGUAGES C)
        add_executable(main main.c)
        $(grep -v '^memscale provides\|memscale::cuda\|memscale::header' $port/usage)" -DCMAKE_PREFIX_PATH="$packages"
    quietly "$out/usage/the build/main"
    command -v python3 > /dev/null && { python3 -c '
import json, re, sys
port = json.load(open(sys.argv[1]))
assert port["name"] == "memscale" and re.fullmatch(r"\d+\.\d+\.\d+", port["version"]) and port["license"] == "MIT"
assert port["dependencies"] == [{"name": "vcpkg-cmake", "host": True}]' $port/vcpkg.json || exit 1; }
    return 0
}

# The recipe: the package is made, and its test runs; and a program that pkg-config gives the flags for.
check_conan() {
    local conan cc=${CC:-cc}
    unset CC CXX # by the name cc, Conan knows no compiler
    conan=$(dirname "${PYTHON:-python3}")/conan
    [ -x "$conan" ] || conan=conan
    need "$conan" cmake
    "$conan" --version 2> /dev/null | grep -q 'version 2' || { echo 'no Conan 2'; exit 77; }
    export CONAN_HOME="$out/conan"
    mkdir -p "$out/checkout/docs" "$out/checkout/tests"
    cp memscale.h LICENSE "$out/checkout" && cp -r docs/packaging "$out/checkout/docs" &&
        cp tests/compile_program.c "$out/checkout/tests" || exit 1
    rm -rf "$out/checkout/docs/packaging/conan/test_package/build"
    quietly "$conan" profile detect
    (cd "$out/checkout" && quietly bash -ec "PATH=\$PATH:$(dirname "$(command -v "$conan")")
        $(snippet sh 'conan create') -s build_type=Debug --no-remote") || exit 1
    grep -q "memscale/$version (test package): RUN: ./trains" "$out/log" || fail 'its test has not run' "$(tail "$out/log")"
    need pkg-config
    program "$out/program"
    snippet ini '[requires]' | sed 's/^CMakeDeps/PkgConfigDeps/; /^CMakeToolchain/d' > "$out/program/conanfile.txt"
    quietly "$conan" install "$out/program" --output-folder "$out/program" --no-remote -s build_type=Debug
    export PKG_CONFIG_PATH="$out/program"
    (cd "$out/program" && quietly eval "$cc -o trainer main.c memscale.c $(pkg-config --cflags --libs memscale)" && quietly ./trainer)
}

check_$1
