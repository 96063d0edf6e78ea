"""Tiles and schedules in use compile for Hopper without a GPU: few spills, wgmmas not serialised, fitting memory.

Through the launchers, told of a Hopper device and stopped short of the launch.
"""

import json
from functools import cache

import pytest

from tests.attention.offline import ON_HOPPER, assembled, run_apart

COMPILE = (
    ON_HOPPER
    + """
import json, re, sys
from cs336_systems.attention.flash import backward as flash
from cs336_systems.attention.flash import forward as flash_forward
from cs336_systems.attention.hopper import backward, forward, host

host.current_stream = lambda device: 0
host.counter = lambda device, stream: torch.zeros(1, dtype=torch.int32)
forward.n_multiprocessors = backward.n_multiprocessors = lambda device: 132
found, forms = {}, {}
for name, d_head in json.loads(sys.argv[1]):
    compiled.clear()
    length = 256 if "short" in name else 2048
    q = torch.zeros(1, 2, length, d_head, dtype=torch.bfloat16)
    tensors = q, q, q, q, torch.zeros(1, 2, length), q, q, q, q
    starts = torch.zeros(1, length, dtype=torch.int32) if "packed" in name else None
    if name.startswith("hopper_forward"):
        forward.launch_forward(q, q, q, True, 0.1, starts_BQ=starts)
    elif name.startswith("flash"):
        flash_forward.launch_forward(q, q, q, True, 0.1, starts)
        flash.launch_backward(*tensors, True, 0.1, starts)
    else:
        backward.launch_backward(*tensors, True, 0.1, "in order" in name, starts_BQ=starts)
    of_form = forms.setdefault(("packed" in name, d_head), {})  # which compile once
    of_form |= compiled
    kernel = of_form[f"{name.split()[0]}_kernel"] if "flash" in name else compiled[f"{name.split()[0]}_kernel"]
    metadata = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    ptx = kernel.asm["ptx"]
    places = dict.fromkeys(re.findall(r"mov\\.b32\\s+(%r\\d+), global_smem;", ptx), 0)
    for register, base, offset in re.findall(r"add\\.s32\\s+(%r\\d+), (%r\\d+), (\\d+);", ptx):
        if base in places:
            places[register] = places[base] + int(offset)
    inits = re.findall(r"mbarrier\\.init\\S* \\[(%r\\d+)\\]", ptx)
    found[f"{name} {d_head}"] = ptx, metadata | {"barriers": sorted(places[register] for register in inits)}
print(json.dumps(found))
"""
)
SPILLED = {
    ("flash_dkdv", 64): 128,
    ("flash_dkdv", 128): 16,
    ("flash_dkdv packed", 64): 128,
    ("flash_dkdv packed", 128): 48,
    ("flash_dq packed", 64): 0,
    ("flash_dq packed", 128): 0,
    ("flash_forward packed", 64): 0,
    ("flash_forward packed", 128): 0,
    ("hopper_forward", 64): 0,
    ("hopper_forward", 128): 0,
    ("hopper_forward short", 64): 0,
    ("hopper_forward short packed", 64): 0,
    ("hopper_forward packed", 64): 64,  # of a tile of queries, none in the loop over keys
    ("hopper_forward packed", 128): 0,
    ("hopper_backward", 128): 256,
    ("hopper_backward packed", 64): 16,
    ("hopper_backward packed", 128): 304,
    ("hopper_backward in order", 64): 8,
    ("hopper_backward in order", 128): 304,
}
"""By kernel and head dimension, the most bytes that may be spilled."""


@cache
def compiled() -> dict[str, tuple[str, dict]]:
    return json.loads(run_apart(COMPILE, json.dumps(list(SPILLED))))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "d_head"), SPILLED)
def test_what_is_in_use_compiles_for_hopper(kernel: str, d_head: int) -> None:
    ptx, metadata = compiled()[f"{kernel} {d_head}"]
    found = assembled(ptx)
    print(kernel, d_head, found, metadata)
    assert max(found["spill_stores"], found["stack_frame"]) <= SPILLED[kernel, d_head]
    assert found["wgmma"] > 0
    assert not found["serialised"]
    assert metadata["shared"] <= 227 * 1024
    if kernel.startswith("hopper"):
        assert metadata["warps"] in (12, 16)
        # Behind all tiles: what a barrier leaves behind would else race with the copies of a tile into the same bytes.
        assert metadata["barriers"][0] > metadata["shared"] - 1024
        assert len(metadata["barriers"]) == len(set(metadata["barriers"]))
