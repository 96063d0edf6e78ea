"""Stretches of tensors in files: any cut reads what any other cut wrote, and what does not fit together is refused."""

import json
import random
import zlib
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from cs336_systems.distributed.stretches import (
    Stretch,
    fill,
    read_index,
    read_whole,
    write_index,
    write_stretches,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)


def cut(choose, n, parts):
    """Boundaries of so many stretches of n elements, some of them empty."""
    return sorted([0, n, *(choose.randint(0, n) for _ in range(parts - 1))])


def stretches_of(whole, bounds, order):
    flat = whole.permute(list(order)).reshape(-1)
    order = () if list(order) == sorted(order) else tuple(order)
    shape = tuple(whole.shape)
    return [Stretch(shape, start, flat[start:stop], order) for start, stop in pairwise(bounds)]


def write_cut(folder, tensors, choose, n_ranks):
    """Each tensor's stretches, dealt out to files of as many ranks; some ranks have nothing of some tensors."""
    of_ranks = [{} for _ in range(n_ranks)]
    for name, whole in tensors.items():
        order = choose.sample(range(whole.dim()), whole.dim())
        stretches = stretches_of(whole, cut(choose, whole.numel(), n_ranks), order)
        for own, stretch in zip(of_ranks, stretches, strict=True):
            if stretch.values.numel() or stretch.is_whole:
                own[name] = stretch
    files = [write_stretches(folder / f"rank-{rank}.safetensors", own) for rank, own in enumerate(of_ranks)]
    write_index(folder, files)
    return [file.name for file in files]


def test_any_cut_reads_what_any_other_wrote(tmp_path):
    choose = random.Random(0)
    for round_ in range(10):
        folder = tmp_path / str(round_)
        folder.mkdir()
        tensors = {}
        for number, dtype in enumerate(DTYPES):
            shape = [choose.randint(1, 5) for _ in range(choose.randint(0, 4))]
            tensors[f"model/{number}"] = torch.randint(0, 2, shape).to(dtype) if number else torch.randn(shape)
        tensors["empty"] = torch.zeros(0, 3)
        files = write_cut(folder, tensors, choose, choose.randint(1, 4))
        stored = read_index(folder, files)
        assert stored.keys() == tensors.keys()
        for name, whole in tensors.items():
            assert (stored[name].shape, stored[name].dtype) == (tuple(whole.shape), whole.dtype)
            assert torch.equal(read_whole(stored[name]), whole)
            order = choose.sample(range(whole.dim()), whole.dim())
            for expected in stretches_of(whole, cut(choose, whole.numel(), 3), order):
                got = Stretch(expected.shape, expected.start, torch.empty_like(expected.values), expected.order)
                fill(got, stored[name])
                assert torch.equal(got.values, expected.values)
            columns_first = torch.empty(whole.shape[::-1], dtype=whole.dtype).permute(list(range(whole.dim()))[::-1])
            fill(Stretch.whole(columns_first), stored[name])
            assert torch.equal(columns_first, whole)


def test_files_are_safetensors_and_digests_theirs(tmp_path):
    tensors = {"a": torch.arange(5), "b": torch.randn(3).bfloat16(), "c": torch.ones((), dtype=torch.bool)}
    file = write_stretches(tmp_path / "x.safetensors", {name: Stretch.whole(value) for name, value in tensors.items()})
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], value.reshape(-1)) for name, value in tensors.items())
    content = (tmp_path / "x.safetensors").read_bytes()
    assert (file.n_bytes, file.crc32) == (len(content), zlib.crc32(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["w"]["stretches"].pop(), "has 3 elements"),
        (lambda index: index["w"]["stretches"].append(["b", 3, 3]), "is not in b"),
        (lambda index: index["w"]["stretches"][0].__setitem__(2, 2), "is not in a"),
        (lambda index: index["w"].__setitem__("dtype", "BF16"), "is not in a"),
        (lambda index: index["w"].__setitem__("dtype", "object"), "object"),
        (lambda index: index["w"].__setitem__("order", [0, 0]), "has 6 elements"),
        (lambda index: index["w"]["stretches"][0].__setitem__(0, "../a"), "../a, which is no file of the checkpoint"),
        (lambda index: index.__setitem__("v", index["w"]), "tensor v"),
        (lambda index: index.__setitem__("v", 3), "int"),
    ],
)
def test_an_index_that_does_not_fit_the_files_is_refused(tmp_path, change, message):
    whole = torch.randn(2, 3)
    rows = zip("ab", (whole[:1], whole[1:]), (0, 3), strict=True)
    files = [write_stretches(tmp_path / name, {"w": Stretch((2, 3), start, part)}) for name, part, start in rows]
    write_index(tmp_path, files)
    index = json.loads((tmp_path / "tensors.json").read_text())
    change(index)
    (tmp_path / "tensors.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        read_index(tmp_path, ["a", "b"])


def test_files_that_are_no_safetensors_or_end_early_are_refused(tmp_path):
    write_index(tmp_path, [write_stretches(tmp_path / "a", {"w": Stretch.whole(torch.ones(16))})])
    stored = read_index(tmp_path, ["a"])
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(ValueError, match="a is not read"):
        stored["w"].read(0, 16)
    for header in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{x"):
        (tmp_path / "a").write_bytes(header)
        with pytest.raises(ValueError, match=r"tensors\.json"):
            read_index(tmp_path, ["a"])


def test_tensors_that_are_parts_of_others_are_refused():
    class Part(torch.Tensor):
        pass

    with pytest.raises(ValueError, match=r"Part of \(3,\)"):
        Stretch.whole(torch.ones(3).as_subclass(Part))
