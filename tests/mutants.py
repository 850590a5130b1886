#!/usr/bin/env python3
"""mutants.py - mistakes that the tests have to see. tests/mutants/*.txt plants one after the other in
memscale.h, each in one function:

    == msi_function: what is wrong, and what a user would see of it
    - text of the function, which occurs in it once; any white space counts as one blank
    + what stands there instead

mutants.py plant FROM TO: the header with all of them, of which the environment variable MUTANT
chooses one by its number: the function begins with a copy of its body for each."""
import glob
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class Mutant:
    def __init__(self, where, function, says):
        self.where, self.function, self.says = where, function, says
        self.old, self.new = [], []


def read(paths):
    """The mutants of these files, in order."""
    mutants = []
    for path in paths:
        for number, line in enumerate(open(path), 1):
            line = line.rstrip('\n')
            if line.startswith('== '):
                function, _, says = line[3:].partition(':')
                mutants.append(Mutant('%s:%d' % (path, number), function.strip(), says.strip()))
            elif line[:1] in '-+' and line and mutants:
                (mutants[-1].old if line[0] == '-' else mutants[-1].new).append(line[1:].strip())
    return mutants


def functions(text):
    """name -> where its body begins and ends: behind the brace that ends its first lines, and at the
    brace in the first column."""
    found = {}
    for match in re.finditer(r'^(?:MSI_HD|MSI_WIDE|MEMSCALE_API|static)\b[^;{}=]*?\b(msi?_\w+)\([^;{}]*\)\s*\{\n',
                             text, re.M):
        found.setdefault(match.group(1), []).append((match.end(), text.index('\n}\n', match.end() - 1) + 1))
    return found


def change(body, mutant):
    """The body with the mistake, or an error."""
    old = re.compile(r'\s+'.join(re.escape(word) for word in ' '.join(mutant.old).split()))
    hits = old.findall(body)
    if not mutant.old or len(hits) != 1:
        raise ValueError('%s: %s has the text %d times' % (mutant.where, mutant.function, len(hits)))
    new = '\n'.join(mutant.new)
    return old.sub(lambda _: new, body)


def plant(text, mutants):
    """The header with all mutants, and what was wrong with those that could not be planted."""
    bodies, errors, copies = functions(text), [], {}
    for number, mutant in enumerate(mutants, 1):
        at = bodies.get(mutant.function)
        if not at:
            errors.append('%s: no function %s' % (mutant.where, mutant.function))
            continue
        for place in at:
            body = text[slice(*place)]
            try:
                changed = change(body, mutant)
            except ValueError as error:
                if place is at[-1]:
                    errors.append(str(error))
                continue
            labels = set(re.findall(r'^(\w+):$', body, re.M))
            for label in labels:
                changed = re.sub(r'\b%s\b' % label, '%s_%d' % (label, number), changed)
            copies.setdefault(place, []).append('    if (msi_mutant == %d) {\n%s    return%s;\n    }\n' % (
                number, changed, '' if re.search(r'\bvoid\s+\w+\([^()]*(\([^()]*\)[^()]*)*\)\s*\{\n$',
                                                 text[:place[0]][-600:]) else ' MUTANT_RESULT'))
            break
    pieces, last = [], 0
    for place in sorted(copies):
        pieces += [text[last:place[0]]] + [c.replace('    return MUTANT_RESULT;\n', '') for c in copies[place]]
        last = place[0]
    text = ''.join(pieces) + text[last:]
    return text.replace('#define MEMSCALE_SHARED_DONE\n',
                        '#define MEMSCALE_SHARED_DONE\n#ifdef __cplusplus\nextern "C"\n#else\nextern\n#endif\nint msi_mutant;\n', 1), errors


def main():
    paths = sys.argv[4:] or sorted(glob.glob(HERE + '/mutants/*.txt'))
    text, errors = plant(open(sys.argv[2]).read(), read(paths))
    open(sys.argv[3], 'w').write(text)
    for error in errors:
        print(error)
    return bool(errors)


if __name__ == '__main__':
    sys.exit(main())
