"""What a member says of itself when it registers and pairs. Called where prefill and decode services are composed."""

from kvmesh.errors import BadConfig
from kvmesh.kv.layout import DTypeName, WireName
from kvmesh.model.files import ModelFiles
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.v1 import prefill_pb2, types_pb2

DTYPES: dict[DTypeName, types_pb2.DType.ValueType] = {
    "fp32": types_pb2.DTYPE_FP32,
    "bf16": types_pb2.DTYPE_BF16,
    "fp16": types_pb2.DTYPE_FP16,
}
KV_WIRES: dict[WireName, prefill_pb2.KvWire.ValueType] = {
    "fp32": prefill_pb2.KV_WIRE_FP32,
    "bf16": prefill_pb2.KV_WIRE_BF16,
    "fp16": prefill_pb2.KV_WIRE_FP16,
    "int8": prefill_pb2.KV_WIRE_INT8,
    "fp8": prefill_pb2.KV_WIRE_FP8,
}
KV_WIRE_NAMES: dict[int, str] = {prefill_pb2.KV_WIRE_UNSPECIFIED: "auto", **{code: n for n, code in KV_WIRES.items()}}
"""As the settings name them; a peer may send a code that is not here."""
DTYPE_NAMES: dict[types_pb2.DType.ValueType, DTypeName] = {code: name for name, code in DTYPES.items()}


def describe(
    files: ModelFiles,
    *,
    model_name: str,
    dtype: DTypeName,
    layers: tuple[int, int],
    page_size: int,
    num_pages: int,
    max_tokens: int,
) -> types_pb2.Descriptor:
    """The descriptor of a member that holds `layers` of a model.

    Args:
        model_name: what clients call it; empty for the model's own name.
        max_tokens: longest prompt plus output; 0 for the model's positions.

    Raises:
        BadConfig: max_tokens exceeds the model's positions.
    """
    config = files.config
    if max_tokens > config.max_positions:
        raise BadConfig(f"max_tokens is {max_tokens}; the model has {config.max_positions} positions")
    return types_pb2.Descriptor(
        protocol_version=PROTOCOL_VERSION,
        model_name=model_name or files.name,
        model_fingerprint=files.fingerprint,
        dtype=DTYPES[dtype],
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=num_pages,
        max_tokens=max_tokens or config.max_positions,
        layers=types_pb2.LayerRange(begin=layers[0], end=layers[1]),
        vocab_size=config.vocab_size,
    )
