"""The messages between ingress and instance survive the wire, and anything else is refused."""

import msgspec
import numpy as np
import pytest

from conflux_ray import wire
from conflux_ray.wire import Feature, FinishReason, LoadReport, Logprobs, Outputs, RequestOutput, Sampling, Slo

SAMPLING = Sampling(
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    seed=3,
    eos_token_id=2,
    stop_token_ids=(5, 6),
    all_stop_token_ids=(2, 5, 6),
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias={11: -100.0},
    allowed_token_ids=(1, 2, 3),
    bad_words_token_ids=((8, 9), (10,)),
    logprobs=5,
    structured_outputs={"regex": "a+"},
)
ADD = wire.AddRequest(
    "cmpl-1", 2, [1, 2, 3], SAMPLING, Slo(0.5, 0.05, "chat"), output_token_ids=[4], priority=-1, age_s=0.25
)
REPORT = LoadReport(queued_work_s=0.5, capacity=1000.0, running=3, waiting=1, kv_used_fraction=0.25, draining=True)


@pytest.mark.parametrize(
    "message", [wire.Hello(1, "ingress-1", "secret"), ADD, wire.Abort([("cmpl-1", 2)]), wire.Ping(), wire.Bye("why")]
)
def test_every_message_to_an_instance_survives_the_wire(message):
    assert wire.decode_to_instance(wire.encode(message)) == message


def test_every_message_to_an_ingress_survives_the_wire():
    output = RequestOutput("cmpl-1", 2, 1, [9], FinishReason.STOP, stop_reason="<end>", cached_tokens=16, queued_s=0.1)
    for message in (
        wire.Ready(1, "i0", "a", "model", 2048, 49152, 64, (Feature.LOGPROBS,)),
        wire.Rejected("wrong token"),
        Outputs("i0", "a", 4, [output], REPORT),
        wire.Bye(),
    ):
        assert wire.decode_to_ingress(wire.encode(message)) == message


def test_logprobs_keep_their_values_and_shape():
    ids, values, ranks = np.array([[7, 1, 2], [8, 8, 3]]), np.array([[-0.5, -0.1, -2], [-0.1, -0.1, -3]]), [2, 1]
    output = RequestOutput("r", 0, 0, [7, 8], logprobs=Logprobs.from_arrays(ids, values, ranks))
    decoded = wire.decode_to_ingress(wire.encode(Outputs("i", "a", 0, [output], REPORT)))
    assert isinstance(decoded, Outputs)
    assert decoded.outputs[0].logprobs is not None
    got = decoded.outputs[0].logprobs.arrays()
    np.testing.assert_array_equal(got[0], ids)
    np.testing.assert_allclose(got[1], values, rtol=1e-6)
    np.testing.assert_array_equal(got[2], ranks)


def test_logprobs_of_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="are not"):
        Logprobs.from_arrays([[1, 2]], [[0.0]], [1])


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", wire.encode(wire.Rejected("x")), msgspec.msgpack.encode(["add", "id", "attempt"])]
)
def test_anything_else_is_a_decode_error(data):
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_instance(data)


def test_a_field_added_at_the_end_by_a_newer_peer_is_ignored():
    newer = [*msgspec.msgpack.decode(wire.encode(ADD)), "a field of the future"]
    assert wire.decode_to_instance(msgspec.msgpack.encode(newer)) == ADD


def test_plain_greedy_sampling_needs_no_feature():
    assert Sampling(max_tokens=1, temperature=0.0, seed=1).required_features() == frozenset()


def test_required_features_name_what_the_parameters_use():
    assert SAMPLING.required_features() == {
        Feature.LOGPROBS,
        Feature.PENALTIES,
        Feature.MIN_P,
        Feature.MIN_TOKENS,
        Feature.SEED,
        Feature.LOGIT_BIAS,
        Feature.BAD_WORDS,
        Feature.ALLOWED_TOKEN_IDS,
        Feature.STRUCTURED_OUTPUTS,
    }
