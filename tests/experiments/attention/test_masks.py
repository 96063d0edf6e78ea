"""The pictures of masks, and what their command refuses."""

import numpy as np
import pytest
import torch

from cs336_systems.experiments.attention.masks import MASKED, SEEN, SKIPPED, masks_figure, picture
from cs336_systems.report.figures import save


def test_a_block_without_a_seen_score_is_skipped():
    mask = torch.ones(256, 256, dtype=torch.bool).tril()
    found = picture(mask)
    assert (found[:128, 128:] == SKIPPED).all()
    assert (found[128:, :128] == SEEN).all()
    assert np.array_equal(found[:128, :128] == MASKED, ~mask[:128, :128].numpy())


def test_every_mask_has_its_picture_and_its_shares(tmp_path):
    figure = masks_figure(512)
    assert save(figure, tmp_path / "figures" / "masks.png")
    shown = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(shown)[:2] == ["full", "causal"] and len(shown) == 8
    assert (shown["full"].images[0].get_array() == SEEN).all()
    assert shown["full"].texts[0].get_text() == "100 % seen, 0 % of blocks skipped"
    assert shown["causal"].texts[0].get_text() == "50 % seen, 38 % of blocks skipped"  # 6 of 16 blocks
    assert shown["causal, the last 256 queries"].images[0].get_array().shape == (256, 512)
    assert (tmp_path / "figures" / "masks.png").exists()


def test_the_command_draws_where_it_is_told(load_script, tmp_path, capsys):
    main = load_script("scripts/draw_masks.py").main
    assert main(["--length", "512", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "attention_masks.png").exists()
    assert capsys.readouterr().out == f"drew {tmp_path / 'attention_masks.png'}\n"


@pytest.mark.parametrize("length", ["100", "256", "1000"])
def test_bad_input_is_one_sentence(load_script, length, capsys):
    assert load_script("scripts/draw_masks.py").main(["--length", length]) == 2
    error = capsys.readouterr().err
    assert error == f"draw_masks: --length must be a multiple of 128, at least 512, got {length}\n"


def test_an_unusable_folder_is_one_sentence(load_script, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert load_script("scripts/draw_masks.py").main(["--out", str(tmp_path / "file")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
