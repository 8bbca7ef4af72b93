"""What passes the check of an ONNX file, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from prfaas_env.onnx_check import BadNetworkError, check_network

from .bundles import linear_network


def fresh() -> onnx.ModelProto:
    return linear_network(4, "discrete", 16, recurrent=True)


def told(model: onnx.ModelProto) -> str:
    with pytest.raises(BadNetworkError) as caught:
        check_network(model.SerializeToString())
    return str(caught.value)


def fault(content: bytes) -> str:
    """Why a file is refused; empty if it passes."""
    try:
        check_network(content)
    except BadNetworkError as error:
        return str(error)
    return ""


def test_plain_networks_pass() -> None:
    check_network(fresh().SerializeToString())
    check_network(linear_network(4, "continuous", 2).SerializeToString())


def _domain(model: Any) -> None:
    model.graph.node[0].domain = "com.example"


def _opset(model: Any) -> None:
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def _operator(model: Any) -> None:
    model.graph.node[0].op_type = "Loop"


def _large(model: Any) -> None:
    model.graph.node[0].op_type = "ConstantOfShape"


def _subgraph(model: Any) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("body", helper.make_graph([], "g", [], [])))


def _subgraphs(model: Any) -> None:
    graphs = [helper.make_graph([], "g", [], [])]
    model.graph.node[0].attribute.append(helper.make_attribute("bodies", graphs))


def _function(model: Any) -> None:
    model.functions.append(helper.make_function("", "f", [], [], [], [helper.make_opsetid("", 17)]))


def _training(model: Any) -> None:
    model.training_info.add()


def _sparse(model: Any) -> None:
    model.graph.sparse_initializer.add()


def _outside(model: Any) -> None:
    model.graph.initializer[0].external_data.add(key="location", value="/etc/passwd")


def _outside_flag(model: Any) -> None:
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL


def _outside_in_attribute(model: Any) -> None:
    tensor = numpy_helper.from_array(np.zeros(2, dtype=np.float32))
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.node[0].attribute.append(helper.make_attribute("value", tensor))


def _empty(model: Any) -> None:
    del model.graph.node[:]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_domain, "operator 'MatMul' of domain 'com.example': custom operators are not allowed"),
        (_opset, "uses operators of domain 'com.example'"),
        (_operator, "operator 'Loop' is not one that a policy may use"),
        (_large, "operator 'ConstantOfShape' is not one that a policy may use"),
        (_subgraph, "operator 'MatMul' holds a sub-graph"),
        (_subgraphs, "operator 'MatMul' holds a sub-graph"),
        (_function, "defines functions of its own"),
        (_training, "holds training information"),
        (_sparse, "holds a sparse tensor"),
        (_outside, "external data"),
        (_outside_flag, "external data"),
        (_outside_in_attribute, "external data"),
        (_empty, "an empty one"),
    ],
)
def test_what_is_refused(spoil: Callable[[Any], None], expected: str) -> None:
    model = fresh()
    spoil(model)
    assert expected in told(model)


@given(st.binary(max_size=300))
def test_any_bytes_pass_or_are_refused(content: bytes) -> None:
    assert len(fault(content).splitlines()) <= 1


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_wrong_byte_passes_or_is_refused(at: int, change: int) -> None:
    content = bytearray(fresh().SerializeToString())
    content[at % len(content)] ^= change
    assert len(fault(bytes(content)).splitlines()) <= 1


def test_every_cut_of_a_network_is_refused_or_still_whole_messages() -> None:
    content = fresh().SerializeToString()
    refused = 0
    for size in range(len(content)):
        refused += fault(content[:size]) != ""
    # a cut between two top-level fields leaves a whole message; checksums and the runtime find those
    assert refused >= len(content) - 3
