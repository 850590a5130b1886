/*  msvc_headers.h - the headers that memscale.h includes on Windows, of mingw-w64, for clang in the
    dialect of MSVC: they take it for gcc, and what comes after them for MSVC. */
#ifndef MSVC_HEADERS_H
#define MSVC_HEADERS_H

#define __GNUC__            4
#define __GNUC_MINOR__      2
#define __GNUC_PATCHLEVEL__ 1
#pragma push_macro("_MSC_VER")
#undef _MSC_VER

#include <_mingw.h>
#ifndef __MINGW_IMPORT
#define __MINGW_IMPORT extern
#endif
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <intrin.h>

#undef __GNUC__
#undef __GNUC_MINOR__
#undef __GNUC_PATCHLEVEL__
#pragma pop_macro("_MSC_VER")

#endif // MSVC_HEADERS_H
