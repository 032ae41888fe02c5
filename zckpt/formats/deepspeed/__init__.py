"""Checkpoints of DeepSpeed: ZeRO-0, 1, 2, 3 and BF16_Optimizer, rigid and elastic, dense, MoE and tensor-parallel."""

from __future__ import annotations

from zckpt.formats.deepspeed.directory import TagDirectory, find, latest_name
from zckpt.formats.deepspeed.reader import read
from zckpt.formats.deepspeed.shards import BOOKKEEPING
from zckpt.formats.deepspeed.survey import survey

__all__ = ["BOOKKEEPING", "TagDirectory", "find", "latest_name", "read", "survey"]
