"""`agentenv tokens certify | show | diff | replay`: a chat template, certified, and the tokens of episodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from agentenv._util.terminal import wide_console
from agentenv.cli.commands import Commands, subcommand, summary_of
from agentenv.cli.flags import parse, print_json
from agentenv.core.trajectory import Trajectory
from agentenv.runs.display.report import quiet_transformers


@dataclass(frozen=True)
class CertifyConfig:
    """Examine a model's chat template, test it on examples, and write a certificate."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A model that ships with the package, a folder, or a Hugging Face id."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer. Default: the model's."""
    out: str | None = None
    """File of the certificate. Default: <model>.certificate.json."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of variables for the chat template, such as {"enable_thinking": false}."""
    examples: bool = False
    """Show all examples. Default: the first, and those that differ."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ShowConfig:
    """Show an episode's tokens: prompt, actions, feedback and synthesised closes separately."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    episode: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")]
    """Id of the episode, a prefix that no other id has, or a number, which is an index: 0 is the first episode that
    ended, -1 the last."""
    logprobs: bool = False
    """Also show the log-probability, mask and policy version of each token."""
    segment: int | None = None
    """Show only this segment, counted from 0."""
    max_tokens: int | None = None
    """Maximum number of tokens to show per span; JSON contains all."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer. Default: the run's."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class DiffConfig:
    """Show where an episode's tokens differ from the conversation rendered again, and why."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    episode: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")]
    """Id of the episode, a prefix that no other id has, or a number, which is an index: 0 is the first episode that
    ended, -1 the last."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer. Default: the run's."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ReplayConfig:
    """Score a run's stored tokens again and compare with the recorded log-probabilities."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    engine: Literal["hf", "vllm_local", "vllm_http"] | None = None
    """Engine that scores. Default: the engine of the run."""
    base_url: str | None = None
    """URL of a vLLM server, for vllm_http."""
    device: str | None = None
    """Device, for hf: auto, cpu, cuda … Default: the run's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Data type of the weights. Default: the run's."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of further arguments for the engine's constructor. Default: the run's, if the engine is the same."""
    tolerance: float = 1e-3
    """Largest permitted difference: 1e-3 or less for float32, 0.2 for bfloat16."""
    concurrency: int = 64
    """Maximum number of sequences in flight at once."""
    json: bool = False
    """Print JSON."""


def tokens(args: Sequence[str]) -> int:
    """Certify a chat template; show, compare and score again the tokens of a run."""
    command = subcommand("agentenv tokens", _COMMANDS, args)
    if command is None:
        return 0
    quiet_transformers()
    return command(args[1:])


def _certify(args: Sequence[str]) -> int:
    config = parse(CertifyConfig, "tokens certify", args)
    from agentenv.chat.certify.certificate import certificate_report, certify, write_certificate
    from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model

    model = resolve_model(config.model)
    tokenizer = load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else model)
    variables = dict(config.chat_template_kwargs)
    stops = load_stop_token_ids(model)
    certificate = certify(tokenizer, model=config.model, stop_token_ids=stops, variables=variables)
    path = Path(config.out or f"{Path(config.model).name}.certificate.json")
    write_certificate(certificate, path)
    if config.json:
        print_json(certificate.to_dict())
    else:
        console = wide_console()
        console.print(certificate_report(certificate, examples=config.examples))
        console.print(f"certificate: {path}", soft_wrap=True, highlight=False, markup=False)
    return certificate.exit_code


def _show(args: Sequence[str]) -> int:
    config = parse(ShowConfig, "tokens show", args)
    from agentenv.runs.tokens.view import episode_to_json, episode_view, load_run_tokenizer

    trajectory, exit_code = _load(config)
    tokenizer, _ = load_run_tokenizer(config.run, config.tokenizer)
    if config.json:
        print_json(episode_to_json(trajectory, tokenizer, segment=config.segment))
    else:
        only = {"max_tokens": config.max_tokens, "segment": config.segment}
        wide_console().print(episode_view(trajectory, tokenizer, logprobs=config.logprobs, **only))
    return exit_code


def _diff(args: Sequence[str]) -> int:
    config = parse(DiffConfig, "tokens diff", args)
    from agentenv.runs.tokens.diff import diff_episode
    from agentenv.runs.tokens.diff_view import diff_view
    from agentenv.runs.tokens.view import load_run_tokenizer, load_run_variables

    trajectory, exit_code = _load(config)
    tokenizer, stop_token_ids = load_run_tokenizer(config.run, config.tokenizer)
    variables = load_run_variables(config.run)
    mismatches = diff_episode(trajectory, tokenizer, stop_token_ids=stop_token_ids, variables=variables)
    if config.json:
        print_json([mismatch.to_dict() for mismatch in mismatches])
    else:
        wide_console().print(diff_view(mismatches))
    return exit_code


def _load(config: ShowConfig | DiffConfig) -> tuple[Trajectory, int]:
    """Return the episode, and the exit code: 1 if lines of the record are damaged, which is said on stderr."""
    from agentenv.runs.records.scan import ReadReport
    from agentenv.runs.tokens.view import load_episode

    report = ReadReport()
    try:
        trajectory = load_episode(config.run, config.episode, report=report)
    finally:
        if report.damage:
            sys.stderr.write(f"agentenv: {config.run}: {report.damage}\n")
    return trajectory, int(bool(report.damage))


def _replay(args: Sequence[str]) -> int:
    config = parse(ReplayConfig, "tokens replay", args)
    from agentenv.runs.tokens.replay import replay_run

    engine: str | None = config.engine
    report = asyncio.run(
        replay_run(
            config.run,
            engine=engine,
            base_url=config.base_url,
            device=config.device,
            dtype=config.dtype,
            engine_args=config.engine_args or None,
            tolerance=config.tolerance,
            concurrency=config.concurrency,
        )
    )
    if config.json:
        print_json(report.to_dict())
    else:
        wide_console().print(report)
    return report.exit_code


_COMMANDS: Commands = {
    "certify": (summary_of(CertifyConfig), _certify),
    "show": (summary_of(ShowConfig), _show),
    "diff": (summary_of(DiffConfig), _diff),
    "replay": (summary_of(ReplayConfig), _replay),
}
