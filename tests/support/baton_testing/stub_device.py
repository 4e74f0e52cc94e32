"""A device without a device: tensors are shapes and addresses, and the CUDA ops judge each call.

The ops check every argument - dtype, shape, strides, place - before they turn to the driver, which
is not there: that error means that a call was fit. So a runner's calls can be held to the ops'
own rules on any machine that has the library with CUDA code, which `ops/tools/build_cuda.sh
--library` builds. Nothing is computed: what comes back is zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.fp8_parts import input_part
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.collective import Collective, ExchangeSizes
from baton_worker.engine.backends.device.engine import Team
from baton_worker.engine.backends.device.orders import Answer, Order, encode
from baton_worker.engine.backends.device.scaled_kernels import Scaled
from baton_worker.engine.backends.device.seam import (
    DType,
    Event,
    Graph,
    Host,
    MemoryUse,
    Shared,
)
from baton_worker.engine.backends.device.weights import (
    DeviceLatent,
    DeviceLayer,
    DeviceMixture,
    DeviceMtp,
    DeviceWeights,
)
from baton_worker.engine.backends.kernels import OpsKernels
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import Shard

FIT = "CUDA Runtime Error"
"""What the binding says when it comes to the driver."""
_CUDA, _ALIGNMENT = 2, 512
_TYPES: dict[str, tuple[int, int]] = {
    "bfloat16": (4, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
}
"""DLPack's code and bits of each dtype."""


class _Dl(ctypes.Structure):
    """DLPack's managed tensor, flat."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_forget = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = (
    ctypes.py_object,
    (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
)


class StubTensor:
    """Where a tensor would lie. `strides` in elements."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType
    ) -> None:
        self.address, self.shape, self.strides, self.dtype = address, shape, strides, dtype
        self._kept: list[tuple[Any, ...]] = []

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _TYPES[self.dtype][1] // 8

    @property
    def n_bytes(self) -> int:
        """Bytes of a contiguous one."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether nothing lies between its elements."""
        return self.strides == dense(self.shape)

    def __dlpack__(self, **_: Any) -> Any:
        rank = len(self.shape)
        code, bits = _TYPES[self.dtype]
        sizes = (ctypes.c_int64 * max(rank, 1))(*self.shape)
        steps = (ctypes.c_int64 * max(rank, 1))(*self.strides)
        told = _Dl(
            self.address, _CUDA, 0, rank, code, bits, 1, sizes, steps, 0, None, _forget
        )  # fmt: skip
        # A call may be given it twice; it reads both when it has been told of all.
        self._kept = [*self._kept[-1:], (told, sizes, steps)]
        return _capsule(ctypes.addressof(told), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class _Now:
    """An event that has come, and a graph that does nothing."""

    def wait(self) -> None:
        """See `Event.wait`."""

    def seconds_since(self, earlier: Event) -> float:
        """See `Event.seconds_since`."""
        return 0.0

    def replay(self) -> None:
        """See `Graph.replay`."""


class StubDevice:
    """See `seam.Device`: addresses are given out once each, and sizes are held to."""

    name = "no device"

    def __init__(self, total: int = 140 << 30) -> None:
        self._next = self._first = 1 << 40
        self._total = total

    def empty(self, shape: tuple[int, ...], dtype: DType) -> StubTensor:
        """See `Device.empty`."""
        tensor = StubTensor(self._next, shape, dense(shape), dtype)
        self._next += -(-max(tensor.n_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if self._next - self._first > self._total:
            raise DeviceError(f"{dtype}{list(shape)} is more than there is")
        return tensor

    zeros = empty

    def view(self, buffer: StubTensor, at: int, shape: tuple[int, ...], dtype: DType) -> StubTensor:
        """See `Device.view`."""
        made = StubTensor(buffer.address + at, shape, dense(shape), dtype)
        assert buffer.dtype == "uint8"
        assert at % 16 == 0
        assert at + made.n_bytes <= buffer.n_bytes, (at, shape, dtype, buffer.shape)
        return made

    def rows(self, tensor: StubTensor, start: int, stop: int) -> StubTensor:
        """See `Device.rows`."""
        assert 0 <= start <= stop <= tensor.shape[0], (start, stop, tensor.shape)
        at = tensor.address + start * tensor.strides[0] * tensor.itemsize
        return StubTensor(at, (stop - start, *tensor.shape[1:]), tensor.strides, tensor.dtype)

    def columns(self, tensor: StubTensor, start: int, stop: int) -> StubTensor:
        """See `Device.columns`."""
        height, width = tensor.shape
        assert 0 <= start <= stop <= width, (start, stop, tensor.shape)
        at = tensor.address + start * tensor.itemsize
        return StubTensor(at, (height, stop - start), tensor.strides, tensor.dtype)

    def copy(self, source: StubTensor, to: StubTensor) -> None:
        """See `Device.copy`."""
        assert (source.shape, source.dtype) == (to.shape, to.dtype)

    def host(self, n_bytes: int) -> Host:
        """See `Device.host`."""
        return np.zeros(n_bytes, np.uint8)

    def upload(self, source: npt.NDArray[Any], to: StubTensor) -> None:
        """See `Device.upload`."""
        assert to.is_contiguous
        assert source.nbytes == to.n_bytes, (source.dtype, source.shape, to.dtype, to.shape)

    def download(self, source: StubTensor, to: npt.NDArray[Any]) -> Event:
        """See `Device.download`: zeros come."""
        self.upload(to, source)
        to[...] = 0
        return _Now()

    def shared(self, n_bytes: int) -> Shared:
        """See `Device.shared`; nobody can map it."""
        return Shared(self.empty((n_bytes,), "uint8"), -1, n_bytes)

    def address(self, memory: StubTensor) -> int:
        """See `Device.address`."""
        return memory.address

    def record(self) -> Event:
        """See `Device.record`."""
        return _Now()

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Device.capture`."""
        work()
        return _Now()

    def memory(self) -> MemoryUse:
        """See `Device.memory`."""
        used = self._next - self._first
        return MemoryUse(self._total - used, self._total, used)

    def synchronise(self) -> None:
        """See `Device.synchronise`."""


class JudgedKernels:
    """The ops' own kernels, which refuse what does not fit and cannot do the rest.

    Attributes:
        calls: how often each was found fit.
    """

    def __init__(self) -> None:
        self._ops = OpsKernels.__new__(OpsKernels)  # made for a device that is there
        self.calls: Counter[str] = Counter()

    def attention_scratch_bytes(self, *sizes: int) -> int:
        """See `Kernels.attention_scratch_bytes`."""
        return self._ops.attention_scratch_bytes(*sizes)

    def exchange_head_bytes(self) -> int:
        """See `RankKernels.exchange_head_bytes`."""
        return self._ops.exchange_head_bytes()

    def logprob_workspace_bytes(self, rows: int, vocab_size: int) -> int:
        """See `Kernels.logprob_workspace_bytes`; the op asks the driver for its own."""
        return 64 << 20

    @property
    def latent(self) -> Any:
        """See `Kernels.latent`; its calls are counted as `latent.fold` and so on."""
        return _Judged(self._ops.latent, self.calls, "latent.")

    def __getattr__(self, name: str) -> Any:
        return getattr(_Judged(self._ops, self.calls), name)


class _Judged:
    """Ops by name, each of which refuses what does not fit and counts what does."""

    def __init__(self, ops: Any, calls: Counter[str], prefix: str = "") -> None:
        self._ops, self._calls, self._prefix = ops, calls, prefix

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def judged(*arguments: Any, **named: Any) -> None:
            try:
                op(*arguments, **named)
            except RuntimeError as error:
                if FIT not in str(error):
                    raise
            self._calls[self._prefix + name] += 1

        return judged


class NoFollowers:
    """Ranks that are told and never asked: what they would launch is what rank 0 does."""

    def new_number(self) -> int:
        """See `Followers.new_number`."""
        return 1

    def tell(self, told: Sequence[Order]) -> None:
        """See `Followers.tell`: orders have bytes."""
        for order in told:
            assert encode(order)

    def answers(self) -> list[Answer]:
        """See `Followers.answers`."""
        raise AssertionError("nothing is there that could answer")


def stub_team(device: StubDevice, kernels: Any, shape: ModelShape, size: int) -> Team:
    """Return rank 0's place among ranks whose buffers would lie beside its own."""
    sizes = ExchangeSizes.of(shape, size, n_tokens=4096, item_bytes=2)
    shared = [device.shared(sizes.buffer_bytes(kernels)) for _ in range(size)]
    buffers = tuple(each.tensor for each in shared)
    collective = Collective(device, kernels, Shard(0, size), sizes, shared[0], buffers, 1.0)
    return Team(collective, NoFollowers())


def stub_weights(
    device: StubDevice, model_shape: ModelShape, dtype: Any, n_head_rows: int = 0
) -> DeviceWeights:
    """Return where a model's weights would lie, or a part's, one draft layer among them."""
    hidden = model_shape.hidden_size

    def make(*shape: int) -> Any:
        return device.empty(shape, dtype)

    def matrix(*shape: int, part: int = 0) -> Any:
        """`part`: outputs that are a matrix of their own; 0: scales are of rows."""
        if (fp8 := model_shape.quantisation) is None:
            return make(*shape)
        n_groups = -(-shape[1] // fp8.group_of(shape[1]))
        of_block = fp8.rows if part and fp8.has_blocks(part) else 1
        scales = device.empty((shape[0] // of_block, n_groups), "float32")
        return Scaled(device.empty(shape, "uint8"), scales)

    def mixture(experts: Experts) -> DeviceMixture:
        count, width = experts.count, experts.intermediate_size
        bias = device.empty((count,), "float32") if experts.has_choice_bias else None
        return DeviceMixture(
            device.empty((count, hidden), "float32"), bias,
            matrix(count * 2 * width, hidden, part=width),
            matrix(count * hidden, width, part=hidden),
        )  # fmt: skip

    def latent(mla: Mla) -> DeviceLatent:
        n_heads, rank = model_shape.n_heads, mla.q_rank
        return DeviceLatent(
            make(rank) if rank else None,
            matrix(n_heads * mla.query_size, rank, part=n_heads * mla.query_size) if rank else None,
            make(mla.kv_rank), make(n_heads * mla.unfolded_size, mla.kv_rank),
        )  # fmt: skip

    def layer(index: int) -> DeviceLayer:
        inner, experts = model_shape.mlp_size(index), model_shape.experts_of(index)
        size = model_shape.head_dim
        heads = (make(size), make(size)) if model_shape.has_qk_norm else None
        width = sum(model_shape.projected_sizes)
        return DeviceLayer(
            make(hidden), matrix(width, hidden, part=input_part(model_shape)),
            matrix(hidden, model_shape.o_size, part=hidden), make(hidden),
            matrix(2 * inner, hidden, part=inner) if inner else None,
            matrix(hidden, inner, part=hidden) if inner else None,
            heads, make(width) if model_shape.has_qkv_bias else None,
            mixture(experts) if experts else None,
            latent(model_shape.mla) if model_shape.mla else None,
        )  # fmt: skip

    draft = layer(model_shape.n_layers)
    mtp = DeviceMtp(make(hidden), make(hidden), make(hidden, 2 * hidden), draft, make(hidden))
    layers = tuple(map(layer, range(model_shape.n_layers)))
    embed, norm, head = (
        make(model_shape.vocab_size, hidden),
        make(hidden),
        make(n_head_rows or model_shape.vocab_size, hidden),
    )
    return DeviceWeights(dtype, embed, layers, (mtp,), norm, head, "stub")


def has_cuda_code() -> bool:
    """Whether the library that is found has CUDA code, and comes to a driver that is not there."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return False  # there a call would be made in earnest
    from baton_ops import decoder

    tensor = StubDevice().empty((1, 16), "float32")
    try:
        decoder.broken_rows_into(tensor, StubDevice().empty((1,), "uint8"))
    except RuntimeError as error:
        return FIT in str(error)
    except AttributeError:  # a library for CPUs alone has no such op
        return False
    return False
