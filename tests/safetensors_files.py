#!/usr/bin/env python3
"""safetensors_files.py write FOLDER: a file for test_files, by Python's safetensors.
safetensors_files.py read FOLDER: what test_files has saved there, read by it."""
import sys

import numpy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

COLS = 24


def values(k, dtype):
    """Those that test_files expects: exact in 16 bits."""
    return (numpy.arange(COLS * COLS) % 251 * 0.125 - k).reshape(COLS, COLS).astype(dtype)


def write(folder):
    save_file({'weight0': values(0, numpy.float32), 'model.w1': values(1, numpy.float16).T.copy(),
               'weight2': values(2, numpy.float16), 'a scalar': numpy.array(3, numpy.int64),
               'caf\u00e9 "\\': numpy.zeros((0, 4), numpy.float32)},
              folder + '/from_python.safetensors', metadata={'format': 'pt', 'by': '\u00e9\n\u1f600'})


def read(folder):
    path = folder + '/to_python.safetensors'
    tensors = load_file(path)
    with safe_open(path, 'numpy') as file:
        metadata = file.metadata()
    for k in range(3):
        assert numpy.array_equal(tensors[f'weight{k}'], values(k, numpy.float32)), f'weight{k}'
        assert tensors[f'memscale.state1.weight{k}'].shape == (COLS, COLS)
        assert tensors[f'memscale.updates.weight{k}'] == [0]
    assert metadata['format'] == 'pt' and metadata['memscale.step'] == '0', metadata
    print(len(tensors), 'tensors are read as they were written')


{'write': write, 'read': read}[sys.argv[1]](sys.argv[2])
