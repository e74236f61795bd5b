"""`agentenv tokens certify | show | diff | replay`: what a chat template does, and what an episode's tokens are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agentenv.cli_flags import parse, print_json, subcommand
from agentenv.config import parse_json_object
from agentenv.engines import EngineName
from agentenv.report import quiet_transformers, wide_console


@dataclass(frozen=True)
class CertifyConfig:
    """Find out what a model's chat template does, prove it on examples, and write the certificate."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A model that ships with the package, a folder, or a Hugging Face id."""
    tokenizer: str | None = None
    """Tokenizer's folder or id, where it is not the model's."""
    out: str | None = None
    """File of the certificate; default: <model>.certificate.json."""
    chat_template_kwargs: str = "{}"
    """JSON object of variables for the chat template, such as {"enable_thinking": false}."""
    examples: bool = False
    """Show every example, not only the first and those that differ."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ShowConfig:
    """Show an episode's tokens: prompt, actions, feedback and synthesised closes apart."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    episode: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")]
    """Its id, the beginning of it, or its place among those recorded: 0 is the first that ended, -1 the last."""
    logprobs: bool = False
    """Also the log-probability, mask and policy version of each token."""
    segment: int | None = None
    """Only this segment, from 0."""
    max_tokens: int | None = None
    """Show at most so many tokens of each piece; JSON has them all."""
    tokenizer: str | None = None
    """Tokenizer's folder or id, where it is not the run's."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class DiffConfig:
    """Say where an episode's tokens differ from the conversation rendered anew, and why."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    episode: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")]
    """Its id, the beginning of it, or its place among those recorded: 0 is the first that ended, -1 the last."""
    tokenizer: str | None = None
    """Tokenizer's folder or id, where it is not the run's."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ReplayConfig:
    """Score a run's stored tokens once more and compare with the recorded log-probabilities."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    engine: Literal["hf", "vllm_local", "vllm_http"] | None = None
    """What scores; default: what the run was sampled with."""
    base_url: str | None = None
    """Address of a vLLM server, for vllm_http."""
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Of the weights; default: the run's."""
    engine_args: str | None = None
    """JSON object of further arguments for the engine's constructor."""
    tolerance: float = 1e-3
    """Largest difference that passes; float32: 1e-3 or less, bfloat16: 0.2."""
    concurrency: int = 64
    """Sequences in flight at once."""
    json: bool = False
    """Print JSON."""


def tokens(args: Sequence[str]) -> int:
    """Certify a chat template; show, compare and score again the tokens of a run."""
    command = subcommand("tokens", _COMMANDS, args)
    if command is None:
        return 0
    quiet_transformers()
    return command(args[1:])


def _certify(args: Sequence[str]) -> int:
    config = parse(CertifyConfig, "tokens certify", args)
    from agentenv.loading import load_stop_token_ids, load_tokenizer, resolve_model
    from agentenv.tokens.certificate import certificate_report, certify, write_certificate

    model = resolve_model(config.model)
    tokenizer = load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else model)
    variables = parse_json_object("--chat_template_kwargs", config.chat_template_kwargs)
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
    from agentenv.tokens.view import episode_to_json, episode_view, load_episode, load_run_tokenizer

    trajectory = load_episode(config.run, config.episode)
    tokenizer, _ = load_run_tokenizer(config.run, config.tokenizer)
    if config.json:
        print_json(episode_to_json(trajectory, tokenizer, segment=config.segment))
    else:
        only = {"max_tokens": config.max_tokens, "segment": config.segment}
        wide_console().print(episode_view(trajectory, tokenizer, logprobs=config.logprobs, **only))
    return 0


def _diff(args: Sequence[str]) -> int:
    config = parse(DiffConfig, "tokens diff", args)
    from agentenv.tokens.diff import diff_episode
    from agentenv.tokens.diff_view import diff_view
    from agentenv.tokens.view import load_episode, load_run_tokenizer, load_run_variables

    trajectory = load_episode(config.run, config.episode)
    tokenizer, stop_token_ids = load_run_tokenizer(config.run, config.tokenizer)
    variables = load_run_variables(config.run)
    mismatches = diff_episode(trajectory, tokenizer, stop_token_ids=stop_token_ids, variables=variables)
    if config.json:
        print_json([mismatch.to_dict() for mismatch in mismatches])
    else:
        wide_console().print(diff_view(mismatches))
    return 0


def _replay(args: Sequence[str]) -> int:
    config = parse(ReplayConfig, "tokens replay", args)
    from agentenv.tokens.replay import replay_run

    engine: EngineName | None = config.engine
    report = asyncio.run(
        replay_run(
            config.run,
            engine=engine,
            base_url=config.base_url,
            device=config.device,
            dtype=config.dtype,
            engine_args=config.engine_args,
            tolerance=config.tolerance,
            concurrency=config.concurrency,
        )
    )
    if config.json:
        print_json(report.to_dict())
    else:
        wide_console().print(report)
    return report.exit_code


_COMMANDS: dict[str, tuple[type, Callable[[Sequence[str]], int]]] = {
    "certify": (CertifyConfig, _certify),
    "show": (ShowConfig, _show),
    "diff": (DiffConfig, _diff),
    "replay": (ReplayConfig, _replay),
}
