"""Files of torch.save: read without torch, with each tensor's location, and written with holes.

A file is a zip archive whose records are not compressed (torch/serialization.py and
caffe2/serialize/inline_container.h of 2.13). The record data.pkl is a pickle. In this pickle, a
storage is a persistent id: ("storage", its type, its name, device, elements). The storage's bytes
are the record data/NAME, at a multiple of 64.

torch 2.13 is not a replacement (2026-11-28). In torch, a tensor's location in the file is private
(`UntypedStorage._checkpoint_offset`). With `mmap=True` or `map_location="meta"`, `torch.load`
accepts a record that is shorter than its tensor, and this reader rejects such a record. For holes,
`torch.serialization.skip_data` is a prototype that needs the private FakeTensorMode. With `import
torch`, `convert_checkpoint.py to-hf --dtype fp32` of 0.63 GB took 2.9 CPU seconds instead of 1.0
(rows of `tools/bench/bench_convert.py --layers 6`, 2 busy cores).
"""

import _codecs
import copyreg
import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO

from ..spec.errors import ConfigError, config_error

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}
# newer dtypes, for which no separate storage type exists
ELEMENT_BYTES |= {"uint64": 8, "uint32": 4, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
STRUCT_FORMATS = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}
ALIGNMENT = 64


@dataclass(eq=False)
class FileTensor:
    """A tensor in a file, or a tensor to write.

    `start` is the first element's byte offset in the file. It is -1 if the elements are not in
    row-major order.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    value: float | None = None  # of a tensor with one element
    start: int = -1
    storage: int = -1  # number of its storage during writing

    def numel(self) -> int:
        return prod(self.shape)


class Size(tuple):
    """A torch.Size, which is also written as a torch.Size."""


class GlobalName(str):
    """The module and name of an object in torch, such as torch.float16.

    It is written as that object.
    """


class StandIn:
    """A placeholder for a class in a different package.

    It accepts values and attributes, does nothing, and is written under the name of that class.
    DeepSpeed itself is not imported, because its import takes seconds.
    """

    place = ""  # module and name of the class
    values: tuple[Any, ...] = ()

    def __init__(self, *values: object, **attributes: object):
        self.values = values
        self.__dict__.update(attributes)

    def __reduce__(self) -> Any:
        if self.values:
            return type(self), self.values
        return (
            copyreg.__newobj__,  # type: ignore[attr-defined]
            (type(self),),
            {name: value for name, value in vars(self).items() if name != "values"},
        )


STAND_INS = LossScaler, DynamicLossScaler, ZeroStage, Fragment = tuple(
    type("Stand", (StandIn,), {"place": f"deepspeed.{place}"})
    for place in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
)
ZERO_STAGE_NAMES = (
    "disabled",
    "optimizer_states",
    "gradients",
    "weights",
)  # the members of ZeroStageEnum
_STORAGES = {
    dtype: type("Stand", (StandIn,), {"place": f"torch.{name}Storage"})
    for dtype, name in zip(
        ELEMENT_BYTES,
        (
            "Double",
            "Float",
            "BFloat16",
            "Half",
            "Long",
            "Int",
            "Short",
            "Char",
            "Byte",
            "Bool",
            "ComplexFloat",
        ),
        strict=False,
    )
}
_REBUILD, _NEWER, _UNTYPED, _SIZE, _DEVICE = (
    type("Stand", (StandIn,), {"place": f"torch.{place}"})
    for place in (
        "_utils._rebuild_tensor_v2",
        "_utils._rebuild_tensor_v3",
        "storage.UntypedStorage",
        "Size",
        "device",
    )
)


def zero_stage_member(kind: object, name: str) -> StandIn:
    """Return a member of an enum, which Python 3.11.0 to 3.11.3 write as a `getattr` call.

    Raise an error for every other call.
    """
    if kind is not ZeroStage or name not in ZERO_STAGE_NAMES:
        raise ValueError(f"getattr({kind}, {name!r}) is not allowed in a checkpoint")
    return ZeroStage(ZERO_STAGE_NAMES.index(name))


# Reading
# --------------------------------------------------------------------------------------------------


def read_torch_file(path: Path) -> Any:
    """Read a file's content, with its tensors as `FileTensor`.

    Tensors with one element also store their value. Raise `ConfigError` for a damaged file, or for
    a file that names an object that no checkpoint needs. No code in the file is run.
    """
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            [pickled] = [
                name
                for name in archive.namelist()
                if name.count("/") == 1 and name.endswith("/data.pkl")
            ]
            content = _Reader(
                io.BytesIO(archive.read(pickled)),
                stream,
                archive,
                pickled.removesuffix("data.pkl") + "data/",
            ).load()
            find_tensors(content)  # raises an error if a container contains itself
            return content
    except Exception as error:
        # pickle and zipfile raise many types of errors for a damaged or hostile file.
        raise unsafe_file_error(path, error) from None


def unsafe_file_error(path: Path, error: Exception) -> ConfigError:
    """Return the error for a file that could not be read."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return config_error(
        str(path), f"cannot be read safely: {said[:200]}", "use another copy of the checkpoint"
    )


_PythonPickler: Any = pickle._Pickler  # pyright: ignore[reportAttributeAccessIssue] (those whose steps can be overridden)
_PythonUnpickler: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _Reader(_PythonUnpickler):
    """An unpickler that finds only the few names below, and sets attributes only on stand-ins.

    See "Restricting Globals" in the pickle documentation.
    """

    def __init__(
        self, pickled: io.BytesIO, stream: BinaryIO, archive: zipfile.ZipFile, folder: str
    ):
        super().__init__(pickled)
        self.stream, self.archive, self.folder = stream, archive, folder
        self.known: dict[str, Any] = {kind.place: kind for kind in (*STAND_INS, _DEVICE)} | {
            kind.place: dtype for dtype, kind in _STORAGES.items()
        }
        self.known |= {
            name: GlobalName(name)
            for name in (
                "torch.Tensor",
                "torch.nn.parameter.Parameter",
                *(f"torch.{dtype}" for dtype in ELEMENT_BYTES),
            )
        }
        self.known |= {
            _UNTYPED.place: "",
            _REBUILD.place: self._rebuild_v2,
            _NEWER.place: self._rebuild_v3,
        }
        self.known |= {
            f"torch._utils.{name}": lambda data, *_: data
            for name in ("_rebuild_parameter", "_rebuild_parameter_with_state")
        }
        self.known |= {
            "torch._tensor._rebuild_from_type_v2": self._subclass,
            "torch.Size": Size,
            "_codecs.encode": _codecs.encode,
        }
        self.known |= {"collections.OrderedDict": OrderedDict, "collections.Counter": Counter}
        builtin = {
            "set": set,
            "bytearray": bytearray,
            "complex": complex,
            "getattr": zero_stage_member,
        }
        self.known |= {
            f"{module}.{name}": value
            for module in ("builtins", "__builtin__")
            for name, value in builtin.items()
        }

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (name := f"{module_name}.{global_name}") not in self.known:
            raise pickle.UnpicklingError(
                f"it names {name}, which is not a known object of a checkpoint"
            )
        return self.known[name]

    def _build(self) -> None:
        """Set a stand-in's attributes.

        Raise an error for any other object, because a file could change the classes and functions
        above.
        """
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, OrderedDict):
            return  # the versions of the modules in a state dict
        if (
            not isinstance(made, StandIn)
            or type(state) is not dict
            or any(type(key) is not str or hasattr(StandIn, key) for key in state)
        ):
            raise pickle.UnpicklingError(f"it gives attributes to {type(made).__name__}")
        vars(made).update(state)

    dispatch = _PythonUnpickler.dispatch | {pickle.BUILD[0]: _build}

    def persistent_load(self, pid: tuple[str, str, str, object, int]) -> tuple[str, int, int]:
        """Return (dtype or "", first byte, number of bytes) of a storage."""
        kind, dtype, key, _, numel = pid
        record = self.archive.getinfo(self.folder + key)
        if (
            kind != "storage"
            or dtype not in ("", *_STORAGES)
            or record.compress_type != zipfile.ZIP_STORED
            or record.file_size != numel * ELEMENT_BYTES.get(dtype, 1)
        ):
            raise pickle.UnpicklingError(
                f"its record {record.filename} has {record.file_size} bytes for {numel} elements of"
                f" {dtype or 'one byte'}"
            )
        self.stream.seek(record.header_offset + 26)
        name, extra = struct.unpack("<HH", self.stream.read(4))
        return dtype, record.header_offset + 30 + name + extra, record.file_size

    def _rebuild_v2(
        self,
        storage: tuple[str, int, int],
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *_: object,
    ) -> FileTensor:
        dtype, start, nbytes = storage
        size, value = ELEMENT_BYTES[dtype], None
        least = min([offset, *shape, *stride], default=0)
        end = (
            offset
            + 1
            + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
            if prod(shape)
            else offset
        )
        if least < 0 or end * size > nbytes:
            raise pickle.UnpicklingError(
                f"a tensor of shape {shape} goes beyond its storage of {nbytes} bytes"
            )
        start += offset * size
        if prod(shape) == 1 and dtype in STRUCT_FORMATS:
            self.stream.seek(start)
            [value] = struct.unpack(STRUCT_FORMATS[dtype], self.stream.read(size))
        in_order = not prod(shape) or all(
            length == 1 or own == wanted
            for length, own, wanted in zip(shape, stride, _row_major_strides(shape), strict=True)
        )
        return FileTensor(tuple(shape), dtype, value, start if in_order else -1)

    def _rebuild_v3(
        self,
        storage: tuple[str, int, int],
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *others: Any,
    ) -> FileTensor:
        """Read a tensor whose dtype has no storage type.

        `others` contains requires_grad, hooks, the dtype, and metadata.
        """
        dtype: GlobalName = others[2]
        return self._rebuild_v2((dtype.removeprefix("torch."), *storage[1:]), offset, shape, stride)

    def _subclass(
        self,
        rebuild: Callable[..., FileTensor],
        kind: object,
        arguments: tuple[Any, ...],
        attributes: object,
    ) -> FileTensor:
        """Read a tensor that has attributes, and drop the attributes."""
        if rebuild not in (self._rebuild_v2, self._rebuild_v3):
            raise pickle.UnpicklingError(f"{rebuild} makes no tensor")
        return rebuild(*arguments)


def _row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


# Writing
# --------------------------------------------------------------------------------------------------

# names that may be written unchanged
WRITABLE_GLOBALS = (OrderedDict, Counter, set, bytearray, complex, _codecs.encode)


class _Pickler(_PythonPickler):
    """A pickler that writes `FileTensor` as torch tensors, and stand-ins under their class names.

    `tensors` contains the written tensors.
    """

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, 2)
        self.tensors: list[FileTensor] = []

    def save_global(self, obj: object, name: str | None = None) -> None:
        place = (
            obj
            if isinstance(obj, GlobalName)
            else obj.place
            if isinstance(obj, type) and issubclass(obj, StandIn)
            else ""
        )
        if place:
            module, _, own = place.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
            self.memoize(obj)
        elif any(obj is known for known in WRITABLE_GLOBALS):
            super().save_global(obj, name)
        else:
            raise pickle.PicklingError(f"{obj} is not allowed in a checkpoint")

    dispatch = _PythonPickler.dispatch | {
        kind: lambda self, obj: self.save_global(obj) for kind in (type, FunctionType)
    }

    def persistent_id(self, obj: object) -> Any:
        if not isinstance(obj, _Storage):
            return None
        typed = obj.tensor.dtype in _STORAGES
        count = obj.tensor.numel() * (1 if typed else ELEMENT_BYTES[obj.tensor.dtype])
        return (
            "storage",
            _STORAGES.get(obj.tensor.dtype, _UNTYPED),
            str(obj.tensor.storage),
            "cpu",
            count,
        )

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Size):
            return _SIZE, (tuple(value),)
        if isinstance(value, GlobalName):
            return value
        if not isinstance(value, FileTensor):
            return NotImplemented
        value.storage = len(self.tensors)
        self.tensors.append(value)
        arguments = (
            _Storage(value),
            0,
            value.shape,
            _row_major_strides(value.shape),
            False,
            OrderedDict(),
        )
        return (
            (_REBUILD, arguments)
            if value.dtype in _STORAGES
            else (_NEWER, (*arguments, GlobalName(f"torch.{value.dtype}")))
        )


@dataclass(eq=False)
class _Storage:
    tensor: FileTensor


class _Archive(zipfile.ZipFile):
    """A zip archive as torch writes it, in which records are aligned and a record of zeros is a
    hole.
    """

    def record(self, name: str, size: int) -> zipfile.ZipInfo:
        """Return the next record, padded so that its content begins at a multiple of ALIGNMENT."""
        record = zipfile.ZipInfo(f"archive/{name}")
        record.file_size = record.compress_size = size
        record.header_offset, record.CRC = self.start_dir, 0
        header = len(record.FileHeader()) + 4  # bytes, with the beginning of the padding
        gap = -(self.start_dir + header) % ALIGNMENT
        record.extra = struct.pack("<HH", 0x4246, gap) + b"Z" * gap  # "FB", as torch pads
        return record

    def add_hole(self, stream: BinaryIO, record: zipfile.ZipInfo) -> None:
        """Add a record of zeros without writing the zeros, which no ZipFile method does.

        `stream` must be this archive's file.
        """
        stream.seek(self.start_dir)
        stream.write(record.FileHeader())
        self.start_dir = stream.tell() + record.file_size
        self.filelist.append(record)


def write_torch_file(path: Path, content: object) -> None:
    """Write a file for torch.load.

    Its tensors are contiguous. A tensor with a value is written with that value. All other tensors
    are zeros, stored as holes.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)

    with path.open("wb") as stream, _Archive(stream, "w") as archive:
        for name, text in (
            ("data.pkl", pickled.getvalue()),
            (".format_version", b"1"),
            (".storage_alignment", str(ALIGNMENT).encode()),
            ("byteorder", b"little"),
        ):
            archive.writestr(archive.record(name, len(text)), text)
        for tensor in pickler.tensors:
            size = tensor.numel() * ELEMENT_BYTES[tensor.dtype]
            record = archive.record(f"data/{tensor.storage}", size)
            if tensor.value is None:
                archive.add_hole(stream, record)
            else:
                archive.writestr(record, struct.pack(STRUCT_FORMATS[tensor.dtype], tensor.value))
        for name, text in (("version", b"3\n"), (".data/serialization_id", b"0" * 40)):
            archive.writestr(archive.record(name, len(text)), text)


KeyPath = tuple[Any, ...]


def find_tensors(value: object, keys: KeyPath = ()) -> dict[KeyPath, FileTensor]:
    """Return the tensors in `value`, each under the keys that lead to the tensor."""
    if isinstance(value, FileTensor):
        return {keys: value}
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    return {
        place: tensor
        for key, item in items
        for place, tensor in find_tensors(item, (*keys, key)).items()
    }
