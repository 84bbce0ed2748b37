"""Weights between Hugging Face folders and Megatron models of any layout; names and shapes come from `hf_table`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from transformers import PretrainedConfig

from megatron_ac2.model.chunks import gather_parameters, gpt_models
from megatron_ac2.model.families import Cut, Rule
from megatron_ac2.model.hf_files import HfFolderWriter, HfReader, copy_tokenizer
from megatron_ac2.model.hf_gather import Entry, cut_degree, from_stage, gather
from megatron_ac2.model.hf_groups import gather_whole, is_shared, read_slice, whole_shape
from megatron_ac2.model.hf_headers import head_error, name_errors
from megatron_ac2.model.hf_table import VALUE_HEAD, Table, cut_dim
from megatron_ac2.model.value_head import ValueModel
from megatron_ac2.parallel.collectives import broadcast_object, gather_objects
from megatron_ac2.parallel.host_memory import check_here
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.types import UserError

_VALUE_HEAD_RULE = Rule("output_layer.weight", (VALUE_HEAD,), "whole")


def load_hf_weights(model: torch.nn.Module, hf_config: PretrainedConfig, topology: Topology, path: str | Path) -> None:
    """Fill this rank's shard from the folder's safetensors; only the rows and columns that it needs are read.

    Strict: raises `UserError`, on every rank alike, listing every tensor that is missing, unknown or of another shape.
    A value model takes its head from value_head.safetensors if the folder has one, else keeps its fresh one.
    """
    try:
        _load_stage(gpt_models(model), Table(hf_config), HfReader(path), topology)
        problems = []
    except UserError as error:
        problems = error.problems
    everywhere = dict.fromkeys(problem for rank in gather_objects(problems) for problem in rank)
    if everywhere:
        raise UserError(list(everywhere))


def _load_stage(chunks: Sequence[GPTModel], table: Table, reader: HfReader, topology: Topology) -> None:
    problems = name_errors(table, reader, isinstance(chunks[0], ValueModel))
    if problems:
        raise UserError(problems)
    for rule, parameter in (
        pair for chunk in chunks for pair in _ruled_parameters(chunk, table, topology, topology.expert_rank)
    ):
        if rule is _VALUE_HEAD_RULE and VALUE_HEAD not in reader.names:
            continue
        rule, shapes = _placed_shapes(rule, parameter, table, topology)
        found = _shape_errors(table, reader, rule, shapes, cut_degree(rule.of_expert, topology))
        problems += found
        if found:
            continue
        if is_shared(rule, table, topology):
            loaded = read_slice(reader, rule, table, topology)
        else:
            rank = topology.expert_tensor_rank if rule.of_expert else topology.tensor_rank
            read = [
                _read_piece(reader, name, rule.cut, shape, rank) for name, shape in zip(rule.parts, shapes, strict=True)
            ]
            loaded = table.fuse(rule, read)
        with torch.no_grad():
            parameter.copy_(loaded)
    if problems:
        raise UserError(problems)


def export_hf_weights(
    model: torch.nn.Module, hf_config: PretrainedConfig, topology: Topology
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (HF name, full tensor) on every rank, in the same order. A collective: run it to the end everywhere.

    A tied LM head is not yielded; a value head is, as "value_head.weight". The tensors live on the model's device and
    may be the live parameters themselves: copy what you keep, and change nothing. Of experts, those in the same place
    on their ranks come one after another; one matrix of each of them is in memory at once.
    """
    check_here(next(model.parameters()), "the model's weights")
    gather_parameters(model)
    table = Table(hf_config)
    for chunk in gpt_models(model):  # with `stage` inside: in the order of the model's layers
        for stage, entries in enumerate(gather_objects(_manifest(chunk, table, topology), topology.pg.pp)):
            pieces = _pieces(chunk, table, topology) if stage == topology.pipeline_rank else None
            for entry in entries:
                with torch.no_grad():
                    gathered = gather(next(pieces), entry, table, topology) if pieces is not None else None
                for index, name in enumerate(entry.names):
                    with torch.no_grad():
                        full = from_stage(gathered and gathered[index], entry, stage, table, topology)
                    yield name, full


def save_hf(
    model: torch.nn.Module,
    hf_config: PretrainedConfig,
    topology: Topology,
    path: str | Path,
    tokenizer_from: str | Path,
) -> None:
    """Write a Hugging Face folder: weights, config.json, the tokenizer's files; a value head in a file of its own.

    A collective. Rank 0 writes; the folder appears whole, replacing an older one, or not at all, and then every rank
    raises RuntimeError.
    """
    tensors = export_hf_weights(model, hf_config, topology)
    failure = None
    if topology.rank == 0:
        try:
            _write_folder(tensors, hf_config, path, tokenizer_from)
        except Exception as error:
            failure = f"{path}: not written: {type(error).__name__}: {error}"
    for _ in tensors:  # the other ranks, and all of them after a failure, run the collectives to their end
        pass
    failure = broadcast_object(failure)
    if failure:
        raise RuntimeError(failure)


def _write_folder(
    tensors: Iterator[tuple[str, torch.Tensor]],
    hf_config: PretrainedConfig,
    path: str | Path,
    tokenizer_from: str | Path,
) -> None:
    with HfFolderWriter(path) as writer:
        for name, tensor in tensors:
            if name == VALUE_HEAD:
                writer.add_value_head(name, tensor)
            else:
                writer.add(name, tensor)
        hf_config.save_pretrained(writer.folder)
        copy_tokenizer(tokenizer_from, writer.folder)
        writer.commit()


def _ruled_parameters(
    model: GPTModel, table: Table, topology: Topology, expert_rank: int
) -> Iterator[tuple[Rule, torch.nn.Parameter]]:
    """This rank's parameters with their rules; of experts, with the rules that they have on `expert_rank`."""
    first_layer = model.decoder.layers[0].layer_number - 1
    first_expert = expert_rank * (table.num_experts // topology.expert)
    for name, parameter in model.named_parameters():
        if isinstance(model, ValueModel) and name == _VALUE_HEAD_RULE.megatron:
            yield _VALUE_HEAD_RULE, parameter
        else:
            yield table.rule(name, first_layer, first_expert), parameter


def _exported(
    model: GPTModel, table: Table, topology: Topology, expert_rank: int = 0
) -> Iterator[tuple[Rule, torch.nn.Parameter]]:
    for rule, parameter in _ruled_parameters(model, table, topology, expert_rank):
        copy_of_embedding = rule.megatron == "output_layer.weight" and table.tied and rule is not _VALUE_HEAD_RULE
        if not copy_of_embedding:
            yield rule, parameter


def _manifest(model: GPTModel, table: Table, topology: Topology) -> list[Entry]:
    """Of this chunk's tensors, in the order of `_pieces`."""
    ranks = [_exported(model, table, topology, rank) for rank in range(topology.expert)]
    entries = []
    for placed in zip(*ranks, strict=True):
        rule, parameter = placed[0]
        rules = [other for other, _ in placed] if rule.of_expert else [rule]
        names = zip(*(other.parts for other in rules), strict=True)
        rule, shapes = _placed_shapes(rule, parameter, table, topology)
        for shape, named in zip(shapes, names, strict=True):
            entries.append(Entry(named, rule.cut, rule.of_expert, tuple(shape), parameter.dtype))
    return entries


def _placed_shapes(
    rule: Rule, parameter: torch.nn.Parameter, table: Table, topology: Topology
) -> tuple[Rule, list[torch.Size]]:
    """The shapes of the HF pieces in this rank's parameter, and the rule that says how they are cut here."""
    meta = parameter.detach().to("meta")
    if is_shared(rule, table, topology):
        rule, meta = replace(rule, cut="whole"), whole_shape(meta, topology)
    return rule, [piece.shape for piece in table.unfuse(rule, meta)]


def _pieces(model: GPTModel, table: Table, topology: Topology) -> Iterator[torch.Tensor]:
    for rule, parameter in _exported(model, table, topology):
        shared = is_shared(rule, table, topology)
        yield from table.unfuse(rule, gather_whole(parameter.detach(), topology) if shared else parameter.detach())


def _shape_errors(table: Table, reader: HfReader, rule: Rule, shapes: Sequence[torch.Size], tensor: int) -> list[str]:
    problems = []
    for name, shape in zip(rule.parts, shapes, strict=True):
        expected = table.full_shape(rule.cut, shape, tensor)
        found = reader.shape(name)
        if found != expected and name == VALUE_HEAD:
            problems.append(head_error(reader, found, expected))
        elif found != expected:
            problems.append(f"{name}: found shape {found} in {reader.folder}, config.json says {expected}")
    return problems


def _read_piece(reader: HfReader, name: str, cut: Cut, shape: torch.Size, tensor_rank: int) -> torch.Tensor:
    if cut == "whole":
        return reader.read(name)
    dim = cut_dim(cut)
    start = tensor_rank * shape[dim]
    piece = reader.read_range(name, dim, start, start + shape[dim])
    if cut == "vocab" and piece.shape[0] < shape[0]:
        piece = torch.cat([piece, piece.new_zeros(shape[0] - piece.shape[0], shape[1])])
    return piece
