#!/bin/sh
# install.sh install|uninstall: what the Makefile's targets of these names do. The Makefile exports DESTDIR,
# prefix, includedir, pkgconfigdir and cmakedir.
set -eu
cd "$(dirname "$0")"
package='memscale-config.cmake memscale-config-version.cmake memscale-targets.cmake memscale.c memscale_cuda.cu' # for CMake

for dir in "$prefix" "$includedir" "$pkgconfigdir" "$cmakedir"; do
    case $dir in
    /*) ;;
    *)
        echo "make $1: \"$dir\" is no absolute path" >&2
        exit 1
        ;;
    esac
done

if [ "$1" = uninstall ]; then
    rm -f "$DESTDIR$includedir/memscale.h" "$DESTDIR$pkgconfigdir/memscale.pc"
    for file in $package; do
        rm -f "$DESTDIR$cmakedir/$file"
    done
    rmdir "$DESTDIR$cmakedir" 2> /dev/null || true # unless something else is there
    exit
fi

below() { # DIR TEXT: of a directory below the prefix, with this text for the prefix
    case $1 in
    "$prefix"/*) echo "$2${1#"$prefix"}" ;;
    *) echo "$1" ;;
    esac
}

# A tree that is moved as a whole stays right, as far as its directories are below the prefix.
export version pc_includedir cmake_includedir pc_libs='-lm -pthread'
version=$(awk '/^#define MEMSCALE_VERSION_(MAJOR|MINOR|PATCH) / { printf "%s%s", dot, $3; dot = "." }' ../../memscale.h)
pc_includedir=$(below "$includedir" '${prefix}')
cmake_includedir=$includedir
case $cmakedir in
"$prefix"/*)
    up=$(echo "${cmakedir#"$prefix"}" | sed 's|[^/]\{1,\}|..|g')
    cmake_includedir=$(below "$includedir" "\${CMAKE_CURRENT_LIST_DIR}$up")
    ;;
esac

put() { # FILE DIR: a file, or its template with each @name@ replaced by the variable of that name
    install -d "$DESTDIR$2"
    if [ ! -f "$1.in" ]; then
        install -m 644 "$1" "$DESTDIR$2"
        return
    fi
    awk '{
        while (match($0, /@[a-z_]+@/)) {
            printf "%s%s", substr($0, 1, RSTART - 1), ENVIRON[substr($0, RSTART + 1, RLENGTH - 2)]
            $0 = substr($0, RSTART + RLENGTH)
        }
        print
    }' "$1.in" > "$DESTDIR$2/$1"
    chmod 644 "$DESTDIR$2/$1"
}

put ../../memscale.h "$includedir"
put memscale.pc "$pkgconfigdir"
for file in $package; do
    put $file "$cmakedir"
done
echo "memscale.h $version is in $DESTDIR$includedir"
