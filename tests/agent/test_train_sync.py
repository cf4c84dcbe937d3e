"""Weight pushes are verified, not assumed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from t1_agent.engines.base import EngineError  # noqa: E402
from t1_agent.engines.weights import weights_checksum  # noqa: E402
from t1_agent.sync.inprocess import InProcessSink  # noqa: E402


class Holder:
    """The part of an engine that takes weights, with a fault to inject."""

    def __init__(self, fault=None, dtype=None) -> None:
        self.fault, self.dtype, self.weight_version = fault, dtype, 0

    def load_weights(self, state_dict, version):
        held = {name: tensor.to(self.dtype or tensor.dtype).clone() for name, tensor in state_dict.items()}
        if self.fault == "one bit":
            held["bias"] = torch.nextafter(held["bias"], torch.tensor(float("inf")))
        self.weight_version = version if self.fault != "stale version" else version - 1
        return weights_checksum(held)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_push_returns_the_checksum_of_what_the_engine_holds(dtype):
    model = torch.nn.Linear(2, 1)
    engine = Holder(dtype=dtype)
    assert InProcessSink(engine, dtype).push(model, 3) == weights_checksum(model.state_dict(), dtype)
    assert engine.weight_version == 3


@pytest.mark.parametrize(("fault", "message"), [("one bit", "checksum"), ("stale version", "reports version 2")])
def test_a_push_that_went_wrong_raises(fault, message):
    with pytest.raises(EngineError, match=message):
        InProcessSink(Holder(fault), None).push(torch.nn.Linear(2, 1), 3)
