#!/usr/bin/env python3
"""mutants.py - how much the tests see. tests/mutants/*.txt lists mistakes that could be made in
memscale.h, each in one function:

    == msi_function: what is wrong, and who would see it
    - text of the function, which occurs in it once; any white space counts as one blank
    + what stands there instead

One build has all of them: a function with mistakes begins with a copy of its body for each, and the
environment variable MUTANT says which is made. Every test is run by itself once, to see how long it
takes and which of these functions it calls; then, for each mistake, those that call the function, the
best ones first, until one fails. What was seen is kept in build/mutants/seen.json, and not judged
again: without that file all are.

    make mutants                    all of them; the last lines have the sums
    make mutants MUTANTS=lower      those of sections that have this in their names
    tests/mutants.py plant HEADER   prints the header with all mistakes; errors where a text is gone
"""
import concurrent.futures
import glob
import json
import os
import re
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUT = 'build/mutants'
LEAST_S, TIMES = 20.0, 10.0  # a test that takes longer, and so many times as long as without, has failed

# What the header with mistakes takes from tests/mutants.c.
SHARED = '''#define MEMSCALE_SHARED_DONE
#ifdef __cplusplus
extern "C" {
#endif
extern int msi_mutant;
extern unsigned char msi_reached[];
#ifdef __cplusplus
}
#endif
'''


class Mutant:
    def __init__(self, where, function, says):
        self.where, self.function, self.says = where, function, says
        self.old, self.new, self.section, self.number = [], [], '', 0

    def key(self):
        return '%s | %s | %s' % (self.function, ' '.join(self.old), ' '.join(self.new))


def read():
    """All mutants, in the order of their files."""
    mutants = []
    for path in sorted(glob.glob(ROOT + '/tests/mutants/*.txt')):
        for number, line in enumerate(open(path), 1):
            if line.startswith('== '):
                function, _, says = line[3:].partition(':')
                where = '%s:%d' % (os.path.relpath(path, ROOT), number)
                mutants.append(Mutant(where, function.strip(), says.strip()))
            elif line[0] == '-':
                mutants[-1].old.append(line[1:].strip())
            elif line[0] == '+':
                mutants[-1].new.append(line[1:].strip())
    return mutants


# ---- the header with all mistakes ----------------------------------------------------------------

HEAD = re.compile(r'^(?:MSI_HD|MSI_WIDE|MEMSCALE_API|static)\b[^;{}=]*?\b(msi?_\w+)\([^;{}]*\)\s*\{\n', re.M)


def bodies(text):
    """function -> [where a body begins and ends, whether it returns nothing, section]."""
    found = {}
    tags = [(m.start(), m.group(1)) for m in re.finditer(r'^// >>([a-z]+(?: [a-z]+)?)', text, re.M)]
    for head in HEAD.finditer(text):
        section = [name for at, name in tags if at < head.start()][-1]
        is_void = re.search(r'\bvoid\s+\w+\($', head.group(0)[:head.group(0).index('(') + 1]) is not None
        end = text.index('\n}\n', head.end() - 1) + 1
        found.setdefault(head.group(1), []).append((head.end(), end, is_void, section))
    return found


def plant(text, mutants):
    """The header with those mutants that can be planted, which get numbers; and the others' errors."""
    found, copies, errors = bodies(text), {}, []
    for number, mutant in enumerate(mutants, 1):
        old = re.compile(r'\s+'.join(re.escape(word) for word in ' '.join(mutant.old).split()))
        places = [p for p in found.get(mutant.function, []) if len(old.findall(text[p[0]:p[1]])) == 1]
        if not mutant.old or not places:
            errors.append('%s: not in %s, or not once' % (mutant.where, mutant.function))
            continue
        begin, end, is_void, mutant.section = places[0]
        body = old.sub(lambda _: '\n'.join(mutant.new), text[begin:end])
        for label in set(re.findall(r'^(\w+):$', body, re.M)):
            body = re.sub(r'\b%s\b' % label, '%s_%d' % (label, number), body)
        mutant.number = number
        copies.setdefault(begin, []).append('    if (msi_reached[%d] = 1, msi_mutant == %d) {\n%s%s    }\n' % (
            number, number, body, '    return;\n' if is_void else ''))
    last, pieces = 0, []
    for begin in sorted(copies):
        pieces += [text[last:begin]] + copies[begin]
        last = begin
    return (''.join(pieces) + text[last:]).replace('#define MEMSCALE_SHARED_DONE\n', SHARED, 1), errors


# ---- tests, one by one ---------------------------------------------------------------------------

class Unit:
    """One function of a test program, or, without a name, a whole program."""
    def __init__(self, command, name):
        self.command, self.name = command, name
        self.seconds, self.reached = 0.0, frozenset()
        self.caught = {}  # section -> how many

    def run(self, mutant, timeout):
        """Whether it passes, and its output."""
        env = dict(os.environ, MUTANT=str(mutant), OMP_NUM_THREADS='1', OMP_WAIT_POLICY='passive',
                   OPENBLAS_NUM_THREADS='1')
        if self.name:
            env['TEST_FILTER'] = self.name
        reached = '%s/reached.%d' % (OUT, threading.get_ident())
        env['REACHED'] = reached if mutant == 0 else ''
        start = time.time()
        try:
            done = subprocess.run(self.command, cwd=ROOT, env=env, timeout=timeout, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)
            passes, output = done.returncode == 0, done.stdout.decode(errors='replace')
        except subprocess.TimeoutExpired:
            passes, output = False, 'took too long'
        if mutant == 0:
            self.seconds = time.time() - start
            if os.path.exists(reached):
                self.reached = frozenset(int(n) for n in open(reached).read().split())
                os.remove(reached)
        return passes, output


def make(*targets):
    subprocess.run(['make', '-s', '-k', '-j%d' % os.cpu_count(), 'config=quick', 'OUT=' + OUT,
                    'header=%s/memscale.h' % OUT, 'LDFLAGS=%s/choose.o' % OUT] + list(targets), cwd=ROOT, check=True)


def list_units(pool):
    """The tests of the tier `quick`, and the corpus of the fuzzer."""
    sources = [os.path.relpath(p, ROOT)[:-2] for p in sorted(glob.glob(ROOT + '/tests/test_*.c'))]
    emulated = ('api', 'contract', 'gemm', 'layout', 'memory', 'optimizer', 'verify')
    on_device = [s for s in sources if 'test_cuda' in s or s[11:] in emulated]
    units = []
    for programs, folder in (([s for s in sources if 'test_cuda' not in s], OUT), (on_device, OUT + '/emulated')):
        make(*['%s/%s' % (folder, program) for program in programs])
        for program in programs:
            text = open('%s/%s.c' % (ROOT, program)).read()
            units += [Unit(['%s/%s' % (folder, program)], name)
                      for name in dict.fromkeys(re.findall(r'(?:cmocka_unit_test\w*|T_TWICE)\(\s*(\w+)', text))]
    make(OUT + '/tests/fuzz_api')
    units.append(Unit([OUT + '/tests/fuzz_api'] + sorted(glob.glob(ROOT + '/tests/corpus/*')), ''))
    cache, built = OUT + '/units.json', max(os.path.getmtime(unit.command[0]) for unit in units)
    if os.path.exists(cache) and os.path.getmtime(cache) > built:
        known = json.load(open(cache))
        for unit in units:
            unit.seconds, reached = known.get(' '.join([unit.command[0], unit.name]), [0.0, []])
            unit.reached = frozenset(reached)
        return [unit for unit in units if unit.reached]
    passing = []
    for unit, (passes, output) in zip(units, pool.map(lambda unit: unit.run(0, 600), units)):
        if passes:
            passing.append(unit)
        else:
            print('left out: %s %s: %s' % (unit.command[0], unit.name, output[-300:].strip().split('\n')[-1]))
    json.dump({' '.join([u.command[0], u.name]): [u.seconds, sorted(u.reached)] for u in passing}, open(cache, 'w'))
    return passing


def judge(mutant, units):
    """What sees a mutant, or ''. Those that have seen most for their time come first."""
    left = [unit for unit in units if mutant.number in unit.reached]
    while left:
        unit = max(left, key=lambda u: (u.caught.get(mutant.section, 0) + 0.1 * sum(u.caught.values()) + 0.1) /
                   (u.seconds + 0.02))
        left.remove(unit)
        if not unit.run(mutant.number, LEAST_S + TIMES * unit.seconds)[0]:
            unit.caught[mutant.section] = unit.caught.get(mutant.section, 0) + 1
            return '%s %s' % (os.path.basename(unit.command[0]), unit.name)
    return ''


def main():
    if sys.argv[1:2] == ['plant']:
        text, errors = plant(open(sys.argv[2]).read(), read())
        print(text)
        for error in errors:
            print(error, file=sys.stderr)
        return bool(errors)
    only, most = os.environ.get('MUTANTS', ''), float(os.environ.get('MUTANTS_MOST_S', '1e9'))
    os.chdir(ROOT)
    os.makedirs(OUT, exist_ok=True)
    mutants = read()
    text, errors = plant(open('memscale.h').read(), mutants)
    for error in errors:
        print(error)
    header = OUT + '/memscale.h'
    if not os.path.exists(header) or open(header).read() != text: # or all would be built again
        open(header, 'w').write(text)
    subprocess.run(['cc', '-DMUTANTS=%d' % (len(mutants) + 1), '-c', 'tests/mutants.c', '-o', OUT + '/choose.o'],
                   check=True)
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    units = [unit for unit in list_units(pool) if unit.seconds <= most]
    print('%d tests, %.0f s' % (len(units), sum(unit.seconds for unit in units)), flush=True)
    path = OUT + '/seen.json'
    seen = json.load(open(path)) if os.path.exists(path) else {}
    planted = [m for m in mutants if m.number and only in m.section]
    unseen = [m for m in planted if not seen.get(m.key())]
    lock = threading.Lock()

    def look(mutant):
        by = judge(mutant, units)
        with lock:
            seen[mutant.key()] = by
            json.dump(seen, open(path, 'w'), indent=0)
            print('%-4s %s (%s) %s: %s' % ('seen' if by else 'NOT', by, mutant.section, mutant.function,
                                           mutant.says), flush=True)
    list(pool.map(look, unseen))
    sections = {}
    for mutant in planted:
        counts = sections.setdefault(mutant.section, [0, 0])
        counts[0] += bool(seen.get(mutant.key()))
        counts[1] += 1
    for section, (caught, all_of) in sorted(sections.items()):
        print('%-14s %3d of %3d' % (section, caught, all_of))
    caught, all_of = (sum(c[i] for c in sections.values()) for i in (0, 1))
    print('%-14s %3d of %3d, %.1f %%' % ('all', caught, all_of, 100.0 * caught / max(all_of, 1)))
    return 0


if __name__ == '__main__':
    sys.exit(main())
