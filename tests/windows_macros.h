/*  windows_macros.h - a stand-in for the macros of windows.h, and the Unix headers that define MS_
    names, all of them before memscale.h is seen. The headers that memscale.h itself includes come
    first: those of a platform put up with its own macros. */
#ifndef WINDOWS_MACROS_H
#define WINDOWS_MACROS_H

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __has_include
#if __has_include(<pthread.h>)
#include <pthread.h>
#endif
#if __has_include(<sys/sysinfo.h>)
#include <sys/sysinfo.h>
#endif
#if __has_include(<sys/mman.h>)
#include <sys/mman.h> // MS_SYNC, MS_ASYNC, MS_INVALIDATE
#endif
#if __has_include(<sys/mount.h>)
#include <sys/mount.h> // MS_RDONLY, MS_PRIVATE and twenty more
#endif
#endif

// old keywords of compilers for segments and calls
#define near
#define far
#define pascal
#define cdecl
#define huge
#define NEAR near
#define FAR  far

// minwindef.h, winnt.h
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define IN
#define OUT
#define OPTIONAL
#define CONST const
#define VOID  void
#define CALLBACK
#define WINAPI
#define PASCAL
#define APIENTRY
#define UNALIGNED
#define TRUE         1
#define FALSE        0
#define MAX_PATH     260
#define DELETE       (0x00010000L)
#define READ_CONTROL (0x00020000L)
#define SYNCHRONIZE  (0x00100000L)
#define INFINITE     0xFFFFFFFF

// winerror.h, wingdi.h, winuser.h
#define NO_ERROR                  0L
#define ERROR                     0
#define ERROR_SUCCESS             0L
#define RGB(r, g, b)              ((r) | (g) << 8 | (b) << 16)
#define ABSOLUTE                  1
#define RELATIVE                  2
#define TRANSPARENT               1
#define OPAQUE                    2
#define GetMessage                GetMessageA
#define SendMessage               SendMessageA
#define LoadImage                 LoadImageA
#define DrawText                  DrawTextA
#define CreateWindow(name, title) CreateWindowExA(0, name, title)
#define Yield()
#define CM_NONE 0

// rpcndr.h, combaseapi.h
#define small     char
#define hyper     long long
#define interface struct
#define THIS
#define THIS_
#define PURE

#endif // WINDOWS_MACROS_H
