"""What an ONNX file may hold before a runtime sees it, read from its bytes without any package.

An ONNX file is data, but it can name files outside (external data) and code that is loaded for it (operators of
other domains). Neither has a place in a policy: only plain operators of the standard domain pass, no sub-graphs, no
functions, no data elsewhere. Field numbers are those of `onnx.proto` (ONNX 1.x).
"""

from __future__ import annotations

from collections.abc import Iterator

#: Operators of a small feed-forward or recurrent network. None makes a large tensor from a small file by itself.
OPERATORS = frozenset(
    {
        "Abs",
        "Add",
        "Cast",
        "Clip",
        "Concat",
        "Constant",
        "Div",
        "Elu",
        "Erf",
        "Exp",
        "Flatten",
        "GRU",
        "Gather",
    }
    | {"Gelu", "Gemm", "HardSigmoid", "Identity", "LSTM", "LayerNormalization", "LeakyRelu", "Log", "MatMul"}
    | {"Max", "Min", "Mul", "Neg", "Pow", "RNN", "ReduceMean", "Relu", "Reshape", "Selu", "Sigmoid", "Slice"}
    | {"Softplus", "Softmax", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"}
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_GRAPH, _MODEL_OPSET, _MODEL_TRAINING, _MODEL_FUNCTIONS = 7, 8, 20, 25
_OPSET_DOMAIN = 1
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_TYPE, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_TENSORS, _ATTRIBUTE_FORBIDDEN = (5, 10), {6: "a sub-graph", 11: "a sub-graph"}
_ATTRIBUTE_SPARSE = (22, 23)
_TENSOR_EXTERNAL, _TENSOR_LOCATION = 13, 14
_STANDARD_DOMAINS = ("", "ai.onnx")


class BadNetworkError(ValueError):
    """The file is not an ONNX model, or holds something that a policy may not; the text says what."""


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(value, position behind it)."""
    value = 0
    for k in range(10):
        if at + k >= len(data):
            break
        byte = data[at + k]
        value |= (byte & 0x7F) << (7 * k)
        if byte < 0x80:
            return value, at + k + 1
    raise BadNetworkError("is not an ONNX file, or cut short")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, number or bytes) of one protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise BadNetworkError("is not an ONNX file")
        if number == 0 or at + size > len(data):
            raise BadNetworkError("is not an ONNX file, or cut short")
        yield number, data[at : at + size]
        at += size


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise BadNetworkError("is not an ONNX file")
    return value


def _text(value: int | memoryview) -> str:
    try:
        return bytes(_message(value)).decode("utf-8")
    except UnicodeDecodeError:
        raise BadNetworkError("is not an ONNX file") from None


def _check_tensor(data: memoryview) -> None:
    for number, value in _fields(data):
        if number == _TENSOR_EXTERNAL or (number == _TENSOR_LOCATION and value != 0):
            raise BadNetworkError("keeps weights in another file (external data), which is not allowed")


def _check_attribute(data: memoryview, operator: str) -> None:
    for number, value in _fields(data):
        if number in _ATTRIBUTE_TENSORS:
            _check_tensor(_message(value))
        elif number in _ATTRIBUTE_FORBIDDEN:
            raise BadNetworkError(
                f"operator {operator!r} holds {_ATTRIBUTE_FORBIDDEN[number]}, which is not allowed"
            )
        elif number in _ATTRIBUTE_SPARSE:
            raise BadNetworkError(f"operator {operator!r} holds a sparse tensor, which is not allowed")


def _check_node(data: memoryview) -> None:
    operator, domain, attributes = "", "", []
    for number, value in _fields(data):
        if number == _NODE_TYPE:
            operator = _text(value)
        elif number == _NODE_DOMAIN:
            domain = _text(value)
        elif number == _NODE_ATTRIBUTE:
            attributes.append(_message(value))
    if domain not in _STANDARD_DOMAINS:
        raise BadNetworkError(
            f"operator {operator!r:.80} of domain {domain!r:.80}: custom operators are not allowed"
        )
    if operator not in OPERATORS:
        raise BadNetworkError(f"operator {operator!r:.80} is not one that a policy may use")
    for attribute in attributes:
        _check_attribute(attribute, operator)


def _check_graph(data: memoryview) -> int:
    nodes = 0
    for number, value in _fields(data):
        if number == _GRAPH_NODE:
            _check_node(_message(value))
            nodes += 1
        elif number == _GRAPH_INITIALIZER:
            _check_tensor(_message(value))
        elif number == _GRAPH_SPARSE:
            raise BadNetworkError("holds a sparse tensor, which is not allowed")
    return nodes


def check_network(content: bytes) -> None:
    """Refuse an ONNX file with anything but plain operators and weights.

    Raises:
        BadNetworkError: says what it holds.
    """
    nodes = 0
    for number, value in _fields(memoryview(content)):
        if number == _MODEL_GRAPH:
            nodes += _check_graph(_message(value))
        elif number == _MODEL_OPSET:
            for part, name in _fields(_message(value)):
                if part == _OPSET_DOMAIN and _text(name) not in _STANDARD_DOMAINS:
                    raise BadNetworkError(
                        f"uses operators of domain {_text(name)!r:.80}; custom ones are not allowed"
                    )
        elif number == _MODEL_FUNCTIONS:
            raise BadNetworkError("defines functions of its own, which is not allowed")
        elif number == _MODEL_TRAINING:
            raise BadNetworkError("holds training information, which is not allowed")
    if nodes == 0:
        raise BadNetworkError("is not an ONNX file, or an empty one")
