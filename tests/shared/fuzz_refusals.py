"""Random calls of the handlers that must be refused: one thing is wrong, and there is no memory behind any of it."""

import dataclasses

import numpy as np

from certjax import _ffi
from tests.shared.ffi_frames import DTYPES, Runtime
from tests.shared.fuzz_cases import ATTRIBUTES, OPERANDS, RESULTS, draw_attributes, draw_shape

_WRONG = ("operands", "rank", "axis", "dtype", "attributes", "number", "unsupported")


def draw_refusal(rng, runtime: Runtime) -> tuple[str, str, str]:
    """(what is wrong, the operand where one is, the error) of one call."""
    handler, wrong = str(rng.choice(list(OPERANDS))), str(rng.choice(_WRONG))
    shape = draw_shape(rng)
    if wrong == "unsupported":
        if handler != "certjax_append" and rng.random() < 0.5:
            shape = dataclasses.replace(shape, G=int(rng.choice((0, 17, 1 << 31))))
        else:
            shape = dataclasses.replace(shape, H=int(rng.choice((0, 8, 24, 520, 1024, 1 << 40))))
    attributes = draw_attributes(rng, shape.storage)
    attributes = {name: attributes[name] for name in ATTRIBUTES[handler]}
    names = [*OPERANDS[handler], *RESULTS[handler]]
    told = [[np.dtype(dtype).name, list(dims)] for dtype, dims in map(shape.of, names)]
    operands = len(OPERANDS[handler])
    # The results of an append are its operands: nobody reads how they are described.
    i = int(rng.integers(operands if handler == "certjax_append" else len(names)))
    match wrong:
        case "operands":
            if rng.random() < 0.5:
                del told[i]
                operands -= i < operands
            else:
                told.append(told[i])
        case "rank" if told[i][1] and rng.random() < 0.5:
            del told[i][1][rng.integers(len(told[i][1]))]
        case "rank":
            told[i][1].insert(rng.integers(len(told[i][1]) + 1), int(rng.choice((0, 1, 7))))
        case "axis":
            axis = rng.integers(len(told[i][1]))
            old = told[i][1][axis]
            odd = (old + 1, old - 1, 2 * old + 2, 0 if old else 1, -1, 1 << 40, 1 << 62, -(1 << 63))
            told[i][1][axis] = int(odd[rng.integers(len(odd))])
        case "dtype":
            others = [name for name in DTYPES if name != told[i][0]]
            told[i][0] = str(rng.choice(others))
        case "attributes":
            name = str(rng.choice(list(attributes)))
            kind = rng.integers(3)
            old = attributes.pop(name)
            if kind == 1:
                attributes[name + "s"] = old
            elif kind == 2:
                attributes[name] = np.float64(old)
        case "number":
            odd = {
                "measure": (-1, 3, -(2**31), 2**31 - 1),
                "storage": (-1, 3, -(2**31), 2**31 - 1),
                "isa": (-2, len(_ffi.build_info()["isa_levels"]), -(2**31), 2**31 - 1),
                **{name: (-1, -(2**63)) for name in ("window", "sinks", "span")},
            }
            name = str(rng.choice([name for name in attributes if name in odd]))
            attributes[name] = attributes[name].dtype.type(odd[name][rng.integers(len(odd[name]))])
    empty = [np.zeros(0)] * len(told)
    dtypes, shapes = ({j: told[j][part] for j in range(len(told))} for part in (0, 1))
    error = runtime.call(
        handler, empty[:operands], empty[operands:], attributes, shapes=shapes, dtypes=dtypes, null=True
    )
    return wrong, names[i].replace("hint_", "hint."), error
