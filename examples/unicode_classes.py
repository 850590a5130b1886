#!/usr/bin/env python3
"""Writes unicode_classes.h: which code points are letters, numbers and white space for the regular
expressions of the package tokenizers, which is asked about each of them.

    python3 examples/unicode_classes.py > examples/unicode_classes.h && clang-format -i examples/unicode_classes.h
"""
import tokenizers

CLASSES = (('letters', r'\p{L}'), ('numbers', r'\p{N}'), ('spaces', r'\s'))


def ranges_of(pattern):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated')
    ranges = []
    for point in range(0x110000):
        is_surrogate = 0xd800 <= point < 0xe000
        # Next to a control character, which is in none of the classes.
        if not is_surrogate and len(split.pre_tokenize_str('\1' + chr(point))) == 2:
            if ranges and ranges[-1][1] == point - 1:
                ranges[-1][1] = point
            else:
                ranges.append([point, point])
    return ranges


print('''/*  unicode_classes.h - the code points of three classes of Unicode, as ranges: first, last, first, last...
    Made by unicode_classes.py with tokenizers %s; not to be edited. */
#ifndef MEMSCALE_UNICODE_CLASSES_H
#define MEMSCALE_UNICODE_CLASSES_H

#include <stdint.h>
''' % tokenizers.__version__)
for name, pattern in CLASSES:
    numbers = ', '.join('%d, %d' % tuple(r) for r in ranges_of(pattern))
    print('static const uint32_t unicode_%s[] = { // %s\n%s};\n' % (name, pattern, numbers))
print('#endif // MEMSCALE_UNICODE_CLASSES_H')
