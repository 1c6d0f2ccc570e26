"""Reads files of torch.save without torch, finds the bytes of their tensors, and writes such files
to be filled in.

A file is a zip archive whose records are not compressed (torch/serialization.py and
caffe2/serialize/inline_container.h of 2.13). The record data.pkl is a pickle in which a storage is
a persistent id: ("storage", its type, its name, device, elements); the storage's bytes are the
record data/NAME, at a multiple of 64. Importing torch takes longer than planning a conversion.
"""

import _codecs
import copyreg
import io
import pickle
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO

from ..spec.refusal import Refusal, refuse

SIZES = {
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
# newer dtypes, without a storage type of their own
SIZES |= {"uint64": 8, "uint32": 4, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
NUMBERS = {
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
    """Describes a tensor in a file, or one to be made.

    `start`: the byte of the file where the first element lies; -1 if the elements are not in
    row-major order there.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    value: float | None = None  # for a tensor of one element
    start: int = -1
    storage: int = -1  # number of its storage, while the file is written

    def numel(self) -> int:
        return prod(self.shape)


class Size(tuple):
    """Stands for a torch.Size, and is written as one."""


class Name(str):
    """Names an object of torch by module and name, such as torch.float16, and is written as that
    object.
    """


class Stand:
    """Stands for a class of another package in a file: a stand takes values and attributes, does
    nothing, and is written under that class's name.

    DeepSpeed itself is not imported here: that takes seconds.
    """

    place = ""  # module and name of the class
    values: tuple[Any, ...] = ()

    def __init__(self, *values: Any, **attributes: Any):
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


STANDS = LossScaler, DynamicLossScaler, ZeroStage, Fragment = tuple(
    type("Stand", (Stand,), {"place": f"deepspeed.{place}"})
    for place in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
)
STAGES = ("disabled", "optimizer_states", "gradients", "weights")  # the members of ZeroStageEnum
_STORAGES = {
    dtype: type("Stand", (Stand,), {"place": f"torch.{name}Storage"})
    for dtype, name in zip(
        SIZES,
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
    type("Stand", (Stand,), {"place": f"torch.{place}"})
    for place in (
        "_utils._rebuild_tensor_v2",
        "_utils._rebuild_tensor_v3",
        "storage.UntypedStorage",
        "Size",
        "device",
    )
)


def member(kind: Any, name: str) -> Stand:
    """Reads a member of an enum, which Python 3.11.0 to 3.11.3 write as a call of `getattr`;
    refuses every other call.
    """
    if kind is not ZeroStage or name not in STAGES:
        raise ValueError(f"getattr({kind}, {name!r}) is not allowed in a checkpoint")
    return ZeroStage(STAGES.index(name))


# Reading
# --------------------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    """Reads the content of a file, its tensors as `FileTensor`, those of one element with their
    values.

    Raises `Refusal` for a file that is damaged, or that names an object which no checkpoint needs.
    No code in it is run.
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
            tensors(content)  # raises for a container that holds itself
            return content
    except Exception as error:
        # pickle and zipfile raise what they please for a damaged or hostile file
        raise unsafe(path, error) from None


def unsafe(path: Path, error: Exception) -> Refusal:
    """Returns the refusal of a file that could not be read."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return refuse(
        str(path), f"cannot be read safely: {said[:200]}", "use another copy of the checkpoint"
    )


_PythonPickler: Any = pickle._Pickler  # pyright: ignore[reportAttributeAccessIssue] (those whose steps can be overridden)
_PythonUnpickler: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _Reader(_PythonUnpickler):
    """Finds the few names below and no others (the documentation of pickle, "Restricting Globals"),
    and gives attributes to stand-ins only.
    """

    def __init__(
        self, pickled: io.BytesIO, stream: BinaryIO, archive: zipfile.ZipFile, folder: str
    ):
        super().__init__(pickled)
        self.stream, self.archive, self.folder = stream, archive, folder
        self.known: dict[str, Any] = {kind.place: kind for kind in (*STANDS, _DEVICE)} | {
            kind.place: dtype for dtype, kind in _STORAGES.items()
        }
        self.known |= {
            name: Name(name)
            for name in (
                "torch.Tensor",
                "torch.nn.parameter.Parameter",
                *(f"torch.{dtype}" for dtype in SIZES),
            )
        }
        self.known |= {_UNTYPED.place: "", _REBUILD.place: self._tensor, _NEWER.place: self._newer}
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
        builtin = {"set": set, "bytearray": bytearray, "complex": complex, "getattr": member}
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
        """Sets the attributes of an object, of stand-ins only: otherwise a file could change the
        classes and functions above.
        """
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, OrderedDict):
            return  # the versions of the modules in a state dict
        if (
            not isinstance(made, Stand)
            or type(state) is not dict
            or any(type(key) is not str or hasattr(Stand, key) for key in state)
        ):
            raise pickle.UnpicklingError(f"it gives attributes to {type(made).__name__}")
        vars(made).update(state)

    dispatch = _PythonUnpickler.dispatch | {pickle.BUILD[0]: _build}

    def persistent_load(self, pid: Any) -> tuple[str, int, int]:
        """Returns (dtype or "", first byte, bytes) of a storage."""
        kind, dtype, key, _, numel = pid
        record = self.archive.getinfo(self.folder + key)
        if (
            kind != "storage"
            or dtype not in ("", *_STORAGES)
            or record.compress_type != zipfile.ZIP_STORED
            or record.file_size != numel * SIZES.get(dtype, 1)
        ):
            raise pickle.UnpicklingError(
                f"its record {record.filename} has {record.file_size} bytes for {numel} elements of"
                f" {dtype or 'one byte'}"
            )
        self.stream.seek(record.header_offset + 26)
        name, extra = struct.unpack("<HH", self.stream.read(4))
        return dtype, record.header_offset + 30 + name + extra, record.file_size

    def _tensor(
        self,
        storage: tuple[str, int, int],
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> FileTensor:
        dtype, start, nbytes = storage
        size, value = SIZES[dtype], None
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
        if prod(shape) == 1 and dtype in NUMBERS:
            self.stream.seek(start)
            [value] = struct.unpack(NUMBERS[dtype], self.stream.read(size))
        in_order = not prod(shape) or all(
            length == 1 or own == wanted
            for length, own, wanted in zip(shape, stride, _strides(shape), strict=True)
        )
        return FileTensor(tuple(shape), dtype, value, start if in_order else -1)

    def _newer(
        self,
        storage: tuple[str, int, int],
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *others: Any,
    ) -> FileTensor:
        """Read a tensor of a newer dtype. `others`: requires_grad, hooks, the dtype, metadata."""
        dtype: Name = others[2]
        return self._tensor((dtype.removeprefix("torch."), *storage[1:]), offset, shape, stride)

    def _subclass(
        self, rebuild: Any, kind: Any, arguments: tuple[Any, ...], attributes: Any
    ) -> FileTensor:
        """Reads a tensor that has attributes, and leaves the attributes out."""
        if rebuild not in (self._tensor, self._newer):
            raise pickle.UnpicklingError(f"{rebuild} makes no tensor")
        return rebuild(*arguments)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a row-major tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


# Writing
# --------------------------------------------------------------------------------------------------

# names that may be written as they are
PLAIN = (OrderedDict, Counter, set, bytearray, complex, _codecs.encode)


class _Pickler(_PythonPickler):
    """Writes `FileTensor` as torch's tensors, and stands under the names of their classes.

    `tensors`: the tensors written.
    """

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, 2)
        self.tensors: list[FileTensor] = []

    def save_global(self, obj: Any, name: str | None = None) -> None:
        place = (
            obj
            if isinstance(obj, Name)
            else obj.place
            if isinstance(obj, type) and issubclass(obj, Stand)
            else ""
        )
        if place:
            module, _, own = place.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
            self.memoize(obj)
        elif any(obj is known for known in PLAIN):
            super().save_global(obj, name)
        else:
            raise pickle.PicklingError(f"{obj} is not allowed in a checkpoint")

    dispatch = _PythonPickler.dispatch | {
        kind: lambda self, obj: self.save_global(obj) for kind in (type, FunctionType)
    }

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        typed = obj.tensor.dtype in _STORAGES
        count = obj.tensor.numel() * (1 if typed else SIZES[obj.tensor.dtype])
        return (
            "storage",
            _STORAGES.get(obj.tensor.dtype, _UNTYPED),
            str(obj.tensor.storage),
            "cpu",
            count,
        )

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Size):
            return _SIZE, (tuple(value),)
        if isinstance(value, Name):
            return value
        if not isinstance(value, FileTensor):
            return NotImplemented
        value.storage = len(self.tensors)
        self.tensors.append(value)
        arguments = _Storage(value), 0, value.shape, _strides(value.shape), False, OrderedDict()
        return (
            (_REBUILD, arguments)
            if value.dtype in _STORAGES
            else (_NEWER, (*arguments, Name(f"torch.{value.dtype}")))
        )


@dataclass(eq=False)
class _Storage:
    tensor: FileTensor


@dataclass
class _Archive:
    """Writes a zip archive from its beginning to its end."""

    stream: BinaryIO
    directory: list[bytes] = field(default_factory=list)

    def add(self, name: str, size: int, content: bytes | None) -> None:
        """Add a record; without content a hole of `size` bytes."""
        encoded, at = f"archive/{name}".encode(), self.stream.tell()
        crc, shown = zlib.crc32(content or b""), min(size, 2**32 - 1)
        # names in UTF-8, stored, 1980-01-01
        facts = struct.pack("<HHHHIII", 0x0800, 0, 0, 0x21, crc, shown, shown)

        self._write_header(encoded, size, facts)
        if content is None:
            self.stream.seek(size, io.SEEK_CUR)
        else:
            self.stream.write(content)
        self._list(encoded, size, at, facts)

    def _write_header(self, encoded: bytes, size: int, facts: bytes) -> None:
        """Write the header of a record, padded so that its content begins at a multiple of
        ALIGNMENT.
        """
        large = size >= 2**32 - 1
        extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
        gap = -(self.stream.tell() + 30 + len(encoded) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<HH", 0x4246, gap) + b"Z" * gap  # "FB": the padding that torch writes
        self.stream.write(
            struct.pack("<IH", 0x04034B50, 45 if large else 20)
            + facts
            + struct.pack("<HH", len(encoded), len(extra))
            + encoded
            + extra
        )

    def _list(self, encoded: bytes, size: int, at: int, facts: bytes) -> None:
        """Add a record whose header begins at byte `at` to the directory."""
        far = at >= 2**32 - 1
        fields = [*([size, size] if size >= 2**32 - 1 else []), *([at] if far else [])]
        extra = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
        version = 45 if fields else 20
        lengths = struct.pack(
            "<HHHHHII", len(encoded), len(extra), 0, 0, 0, 0, 2**32 - 1 if far else at
        )
        self.directory.append(
            struct.pack("<IHH", 0x02014B50, version, version) + facts + lengths + encoded + extra
        )

    def close(self) -> None:
        at, count = self.stream.tell(), len(self.directory)
        size = self.stream.write(b"".join(self.directory))
        if at + size >= 2**32 - 1 or count >= 2**16 - 1:
            self.stream.write(
                struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, at)
            )
            self.stream.write(struct.pack("<IIQI", 0x07064B50, 0, at + size, 1))
        least = min(count, 2**16 - 1)
        self.stream.write(
            struct.pack(
                "<IHHHHIIH",
                0x06054B50,
                0,
                0,
                least,
                least,
                min(size, 2**32 - 1),
                min(at, 2**32 - 1),
                0,
            )
        )


def write(path: Path, content: Any) -> None:
    """Writes a file that torch.load reads.

    Its tensors are contiguous: a tensor with a value holds that value, the others zeros (holes).
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    with path.open("wb") as stream:
        archive = _Archive(stream)
        for name, text in (
            ("data.pkl", pickled.getvalue()),
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", b"little"),
        ):
            archive.add(name, len(text), text)
        for tensor in pickler.tensors:
            known = (
                struct.pack(NUMBERS[tensor.dtype], tensor.value)
                if tensor.value is not None
                else None
            )
            archive.add(f"data/{tensor.storage}", tensor.numel() * SIZES[tensor.dtype], known)
        for name, text in (("version", b"3\n"), (".data/serialization_id", b"0" * 40)):
            archive.add(name, len(text), text)
        archive.close()


Keys = tuple[Any, ...]


def tensors(value: Any, keys: Keys = ()) -> dict[Keys, FileTensor]:
    """Lists the tensors in `value`, each under the keys that lead to it."""
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
        for place, tensor in tensors(item, (*keys, key)).items()
    }
