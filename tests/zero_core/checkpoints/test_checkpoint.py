"""A checkpoint goes into any plan, and back into its own without a bit's difference."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.zero_core import engine_runs
from tests.zero_core.ranks import RankError, RankPool
from tests.zero_core.reference import build_model, relative_difference
from zero_core import ZeroConfig
from zero_core.checkpoints.manifest import Manifest

STATE = {"cursor": 36, "note": "anything that JSON can say"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_same_plan_goes_on_bit_for_bit(
    pools: dict[int, RankPool], tmp_path: Path, world_size: int, stage: int, precision: str
) -> None:
    config = ZeroConfig(stage=stage, precision=precision)  # type: ignore[arg-type]
    path = tmp_path / "step-3"
    undisturbed = pools[world_size].run(engine_runs.train, config, True, 6)[0]
    pools[world_size].run(engine_runs.save_after, config, True, 3, path, STATE)
    resumed, state = pools[world_size].run(engine_runs.resume, config, True, path, 6)[0]
    assert state == STATE
    assert resumed.losses == undisturbed.losses[3:]
    assert resumed.reports == undisturbed.reports[3:]
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ((4, 3), (1, 0)),
        ((1, 0), (4, 3)),
        ((3, 1), (2, 3)),
        ((2, 2), (3, 2)),
        ((2, 0), (4, 1)),
        ((2, 3), (3, 0)),
    ],
    ids=str,
)
def test_any_plan_reads_any_other(
    pools: dict[int, RankPool], tmp_path: Path, written: tuple[int, int], read: tuple[int, int]
) -> None:
    path = tmp_path / "step-3"
    pools[written[0]].run(engine_runs.save_after, ZeroConfig(stage=written[1]), True, 3, path, STATE)
    resumed, _ = pools[read[0]].run(engine_runs.resume, ZeroConfig(stage=read[1]), True, path, 6)[0]
    undisturbed = pools[read[0]].run(engine_runs.train, ZeroConfig(stage=read[1]), True, 6)[0]
    assert resumed.losses == pytest.approx(undisturbed.losses[3:], rel=1e-5)
    assert relative_difference(resumed.weights, undisturbed.weights) < 1e-5


def test_every_element_is_stored_once(pools: dict[int, RankPool], tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    pools[3].run(engine_runs.save_after, ZeroConfig(stage=0), True, 1, path, STATE)
    manifest = Manifest.read(path)
    model = build_model(tied=True)
    stored: dict[str, int] = {}
    for file in manifest.files:
        with safe_open(path / file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if key.endswith("/exp_avg"):
                    name = key.removesuffix("/exp_avg")
                    stored[name] = stored.get(name, 0) + tensors.get_tensor(key).numel()
    assert stored == {name: p.numel() for name, p in model.named_parameters()}
    assert manifest.bytes == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    assert sorted(p.name for p in path.iterdir()) == sorted([*manifest.files, "manifest.json"])


def damage_by_flipping_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def damage_by_cutting(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_by_deleting(path: Path) -> None:
    path.unlink()


def damage_the_manifest(path: Path) -> None:
    (path.parent / "manifest.json").write_text("{}")


def damage_by_losing_the_manifest(path: Path) -> None:
    (path.parent / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_by_flipping_a_bit, "was altered"),
        (damage_by_cutting, "bytes; "),
        (damage_by_deleting, "is missing"),
        (damage_the_manifest, "can't be read"),
        (damage_by_losing_the_manifest, "never completed"),
    ],
)
def test_a_damaged_one_is_refused_with_its_reason(
    pools: dict[int, RankPool], tmp_path: Path, damage: object, words: str
) -> None:
    path = tmp_path / "step-1"
    pools[2].run(engine_runs.save_after, ZeroConfig(stage=3), True, 1, path, STATE)
    assert callable(damage)
    damage(path / "rank-00001.safetensors")
    with pytest.raises(RankError, match=words):
        pools[2].run(engine_runs.resume, ZeroConfig(stage=3), True, path, 2)


def test_another_models_is_refused_by_name(pools: dict[int, RankPool], tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    pools[2].run(engine_runs.save_after, ZeroConfig(stage=3), False, 1, path, STATE)
    with pytest.raises(RankError, match=r"of another model: lm_head\.weight has shape \[64, 32\] there"):
        pools[2].run(engine_runs.resume, ZeroConfig(stage=3), True, path, 2)


def test_a_rank_that_cant_write_leaves_nothing(pools: dict[int, RankPool], tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    with pytest.raises(RankError, match=r"No space left|File too large"):
        pools[2].run(save_with_little_room, path)
    assert not path.exists()


def save_with_little_room(path: Path) -> None:
    """Rank 1 may write files of 1 KiB at most; both must give up."""
    import resource
    import signal

    import torch.distributed as dist

    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    engine_runs.save_after(ZeroConfig(stage=3), True, 1, path, STATE)
