"""Calls the extension's handlers as XLA does, without XLA: any operands and attributes, and no compilation.

Operands lie between pages that may not be touched, at either end, so that an access out of bounds ends the process.
The layouts are those of XLA's C API for FFI calls, version 0.3.
"""

import ctypes
import math
import mmap
import random
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from certjax import _ffi

PAGE = mmap.PAGESIZE
DTYPES = {
    **{"bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9},
    **{"float16": 10, "float32": 11, "float64": 12, "bfloat16": 16},
}
_VOID, _SIZE, _I64, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


def _struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", _SIZE), ("extension", _VOID), *fields]})


_Buffer = _struct("Buffer", ("dtype", _INT), ("data", _VOID), ("rank", _I64), ("dims", ctypes.POINTER(_I64)))
_List = _struct("List", ("size", _I64), ("types", ctypes.POINTER(_INT)), ("items", ctypes.POINTER(_VOID)))
_Attrs = _struct(
    "Attrs",
    *(("size", _I64), ("types", ctypes.POINTER(_INT)), ("names", ctypes.POINTER(_VOID))),
    ("items", ctypes.POINTER(_VOID)),
)
_Frame = _struct(
    "Frame",
    *(("api", _VOID), ("ctx", _VOID), ("stage", _INT), ("args", _List), ("rets", _List), ("attrs", _Attrs)),
    ("future", _VOID),
)
_ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("code", _INT))
_ErrorMessage = _struct("ErrorMessage", ("error", _VOID), ("message", ctypes.c_char_p))
_ErrorDestroy = _struct("ErrorDestroy", ("error", _VOID))
_FutureCreate = _struct("FutureCreate", ("future", _VOID))
_FutureError = _struct("FutureError", ("future", _VOID), ("error", _VOID))
_Schedule = _struct("Schedule", ("ctx", _VOID), ("task", _VOID), ("data", _VOID))
_Threads = _struct("Threads", ("ctx", _VOID), ("count", ctypes.POINTER(_I64)))
_API = (
    *("Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get", "Type_Register"),
    *("ExecutionContext_Get", "State_Set", "State_Get", "DeviceMemory_Allocate", "DeviceMemory_Free"),
    *("ThreadPool_Schedule", "ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError"),
    *("RunId_Get", "DeviceOrdinal_Get"),
)
_Api = _struct(
    "Api",
    *(("version_size", _SIZE), ("version_extension", _VOID), ("major", _INT), ("minor", _INT), ("internal", _VOID)),
    *((name, _VOID) for name in _API),
)
_CALL = ctypes.CFUNCTYPE(_VOID, _VOID)


class _ByteSpan(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", _SIZE))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", _INT), ("value", _VOID))


class Slots:
    """Memory for the operands of a call, each between two pages without access."""

    def __init__(self, count: int, size: int):
        self.size = -(-size // PAGE) * PAGE
        self._map = mmap.mmap(-1, count * (self.size + PAGE) + PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for i in range(count + 1):
            if libc.mprotect(_VOID(base + i * (self.size + PAGE)), _SIZE(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect failed")
        self._starts = [PAGE + i * (self.size + PAGE) for i in range(count)]
        self._free = []

    def reset(self):
        self._free = self._starts[::-1]

    def take(self, dtype, shape: tuple[int, ...], *, at_end: bool) -> np.ndarray:
        """An array at one end of the next slot, contents as they come."""
        start, dtype = self._free.pop(), np.dtype(dtype)
        count = math.prod(shape)
        if count * dtype.itemsize > self.size:
            raise ValueError(f"an operand of {count * dtype.itemsize} bytes exceeds the {self.size} of a slot")
        start += self.size - count * dtype.itemsize if at_end else 0
        return np.frombuffer(memoryview(self._map)[start : start + count * dtype.itemsize], dtype).reshape(shape)


class Runtime:
    """What a handler may ask XLA for. Its tasks run at once on other threads, or in a random order once it returned, or
    on its own thread, as where there is no pool. Its descriptors are overwritten as soon as it has returned.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._errors: dict[int, bytes] = {}
        self._tasks: list = []
        self._pool = ThreadPoolExecutor(2)
        self._mode = "later"
        self._done: list[str] = []  # "" once the future is available, else its error
        calls = {
            "Error_Create": self._error_create,
            "Error_GetMessage": self._error_message,
            "Error_Destroy": self._error_destroy,
            "ThreadPool_Schedule": self._schedule,
            "ThreadPool_NumThreads": self._count,
            "Future_Create": self._future_create,
            "Future_SetAvailable": self._available,
            "Future_SetError": self._failed,
        }
        self._keep = {name: _CALL(fn) for name, fn in calls.items()}
        pointers = {name: ctypes.cast(fn, _VOID) for name, fn in self._keep.items()}
        self._api = _Api(ctypes.sizeof(_Api), version_size=24, major=0, minor=3, **pointers)
        capsule = ctypes.pythonapi.PyCapsule_GetPointer
        capsule.restype, capsule.argtypes = _VOID, [ctypes.py_object, ctypes.c_char_p]
        self._handlers = {
            name: _CALL(capsule(handler, None)) for name, handler in _ffi._require().registrations().items()
        }

    def _new_error(self, message: bytes) -> int:
        key = len(self._errors) + 1
        self._errors[key] = message
        return key

    def _error_create(self, args):
        return self._new_error(_ErrorCreate.from_address(args).message)

    def _error_message(self, args):
        at = _ErrorMessage.from_address(args)
        at.message = self._errors[at.error]

    def _error_destroy(self, args):
        pass

    def _schedule(self, args):
        if self._mode == "no pool":
            return self._new_error(b"there is no pool")
        at = _Schedule.from_address(args)
        task, data = _CALL(at.task), at.data
        self._tasks.append(self._pool.submit(task, data) if self._mode == "now" else lambda: task(data))
        return None

    def _count(self, args):
        _Threads.from_address(args).count[0] = self._random.choice((1, 2, 3, 8))

    def _future_create(self, args):
        _FutureCreate.from_address(args).future = 1

    def _available(self, args):
        self._done.append("")

    def _failed(self, args):
        self._done.append(self._errors[_FutureError.from_address(args).error].decode())

    def call(self, name: str, operands, results, attributes, *, shapes=None, dtypes=None, null=False) -> str:
        """Returns "" or the error's message.

        Args:
          name: of the handler.
          operands: arrays; `results` likewise, written to.
          attributes: name → numpy scalar.
          shapes: i → shape that is told instead of array i's own (operands first, then results); `dtypes` likewise.
          null: no memory at all, for calls that must be refused.
        """
        buffers, keep = [], []
        for i, x in enumerate([*operands, *results]):
            shape = (shapes or {}).get(i, x.shape)
            dims = (_I64 * max(len(shape), 1))(*shape)
            dtype = (dtypes or {}).get(i, str(x.dtype))
            data = None if null or x.size == 0 else x.ctypes.data
            buffers.append(_Buffer(ctypes.sizeof(_Buffer), None, DTYPES[dtype], data, len(shape), dims))
            keep.append(dims)
        pointers = [ctypes.cast(ctypes.pointer(b), _VOID) for b in buffers]

        def listed(items):
            types, array = (_INT * max(len(items), 1))(*[1] * len(items)), (_VOID * max(len(items), 1))(*items)
            keep.extend((types, array))
            return _List(ctypes.sizeof(_List), None, len(items), types, array)

        spans, scalars, values = [], [], []
        for key in sorted(attributes):  # XLA gives them by name
            x = np.asarray(attributes[key])
            values.append(x)
            spans.append(_ByteSpan(key.encode(), len(key)))
            scalars.append(_Scalar(DTYPES[str(x.dtype)], x.ctypes.data))
        count = max(len(spans), 1)
        types = (_INT * count)(*[3] * len(spans))
        names, items = ((_VOID * count)(*[ctypes.addressof(x) for x in xs]) for xs in (spans, scalars))
        attrs = _Attrs(ctypes.sizeof(_Attrs), None, len(spans), types, names, items)
        frame = _Frame(
            ctypes.sizeof(_Frame) - ctypes.sizeof(_VOID),
            api=ctypes.cast(ctypes.pointer(self._api), _VOID),
            stage=3,
            args=listed(pointers[: len(operands)]),
            rets=listed(pointers[len(operands) :]),
            attrs=attrs,
        )
        self._errors.clear()
        self._tasks.clear()
        self._done.clear()
        self._mode = self._random.choice(("now", "later", "no pool"))
        error = self._handlers[name](ctypes.addressof(frame))
        for item in (*buffers, *keep):
            ctypes.memset(ctypes.addressof(item), 0xAB, ctypes.sizeof(item))
        self._random.shuffle(self._tasks)
        for task in self._tasks:
            task.result() if isinstance(task, Future) else task()
        if error:
            assert not self._tasks, "a call that failed left tasks behind"
            return self._errors[error].decode()
        if frame.future:
            assert len(self._done) == 1, f"a future was completed {len(self._done)} times"
        return "".join(self._done)
