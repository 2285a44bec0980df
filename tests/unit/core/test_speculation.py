"""What requests say about speculation, over what the engine says."""

from __future__ import annotations

from typing import Any

import pytest

from poise.core.sampling_params import SamplingParams
from poise.core.speculation import Speculation, SpeculationOffer, resolve_speculation
from poise.errors import InvalidRequestError

SUFFIX = Speculation("suffix", 6, prompt_lookup_min=3)


@pytest.mark.parametrize(
    ("given", "default", "expected"),
    [
        (None, None, None),
        (None, SUFFIX, SUFFIX),
        (False, SUFFIX, None),
        ({"method": "off"}, SUFFIX, None),
        ({"num_speculative_tokens": 2}, SUFFIX, Speculation("suffix", 2, prompt_lookup_min=3)),
        ({"method": "ngram"}, SUFFIX, Speculation("ngram")),
        ({"method": "suffix", "adaptive": False}, None, Speculation("suffix", adaptive=False)),
    ],
)
def test_a_request_goes_over_the_engine(given: Any, default: Any, expected: Any) -> None:
    assert resolve_speculation(given, default) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, "expected an object or false"),
        ("ngram", "expected an object or false"),
        ({"metod": "ngram"}, "no field 'metod'"),
        ({"method": "eagle"}, "speculative.method is 'eagle'"),
        ({"method": "off", "num_speculative_tokens": 2}, "other fields"),
        ({"num_speculative_tokens": 0}, "1 to 32"),
        ({"num_speculative_tokens": True}, "1 to 32"),
        ({"num_speculative_tokens": 2.5}, "1 to 32"),
        ({"acceptance": "always"}, "coupled, rejection"),
        ({"adaptive": 1}, "true or false"),
        ({"prompt_lookup_min": 0}, "1 to 1024"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, r"at least prompt_lookup_min \(5\)"),
    ],
)
def test_what_means_nothing_is_refused_by_name(given: Any, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected) as refused:
        SamplingParams(speculative=given)
    assert refused.value.param == "speculative"


def test_a_method_needs_naming_where_the_engine_has_none() -> None:
    with pytest.raises(InvalidRequestError, match="names no method"):
        SpeculationOffer().resolve({"num_speculative_tokens": 2})


def test_what_the_engine_lacks_is_refused() -> None:
    offer = SpeculationOffer(SUFFIX)
    assert offer.resolve(None) == SUFFIX
    with pytest.raises(InvalidRequestError, match="'draft_model', this engine offers ngram and"):
        offer.resolve({"method": "draft_model"})
    nothing = SpeculationOffer(methods=(), acceptances=())
    with pytest.raises(InvalidRequestError, match="offers none"):
        nothing.resolve({"method": "ngram"})
