"""What the rig says of a model, on which the requests of the checks depend."""

from __future__ import annotations

from poise.config import resolve
from poise.verify.probes import build_probes
from poise.verify.rig import Rig
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_safetensors_folder


def test_a_window_of_several_groups_is_one_window(tmp_path) -> None:
    """Otherwise requests of one name and different parameters are held against the same answer."""
    model = TinyModel(architecture="gemma3", num_layers=6, window_period=3)
    path = write_safetensors_folder(tmp_path, model)
    rig = Rig(resolve({}, {}), open_checkpoint(path))
    assert [group.sliding_window for group in rig.base.kv_groups] == [None, 40, 40]
    assert rig.windows == [40]
    probes = build_probes(rig.tokenizer, model.vocab_size, quick=False, windows=rig.windows)
    assert len({probe.name for probe in probes}) == len(probes)
