"""`agentenv tokens certify | show | replay`: a chat template, certified, and the tokens of episodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from agentenv._util.terminal import safe, wide_console
from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.cli.main import Commands, subcommand, summary_of
from agentenv.runs.display.report import quiet_transformers


@dataclass(frozen=True)
class CertifyConfig:
    """Test a model's chat template: its class, whether it is exact on examples, and which tokens text can forge."""

    model: Annotated[str, POSITIONAL]
    """A model that ships with the package, a folder, or a Hugging Face id."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer. Default: the model's."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of variables for the chat template, such as {"enable_thinking": false}."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ShowConfig:
    """Show an episode's tokens: prompt, actions, feedback and synthesized closes separately."""

    run: Annotated[str, POSITIONAL]
    """Run directory."""
    episode: Annotated[str, POSITIONAL]
    """Id of the episode, a prefix that no other id has, or a number, which is an index: 0 is the first episode that
    ended, -1 the last."""
    logprobs: bool = False
    """Also show the log-probability, mask and policy version of each token."""
    max_tokens: int | None = None
    """Maximum number of tokens to show per span."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer. Default: the run's."""


@dataclass(frozen=True)
class ReplayConfig:
    """Score a run's stored tokens again and compare with the recorded log-probabilities."""

    run: Annotated[str, POSITIONAL]
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
    """Certify a chat template; show the tokens of a run, or score them again."""
    command = subcommand("agentenv tokens", _COMMANDS, args)
    if command is None:
        return 0
    quiet_transformers()
    return command(args[1:])


def _certify(args: Sequence[str]) -> int:
    config = parse(CertifyConfig, "tokens certify", args)
    from agentenv.chat.certify import certify
    from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model

    model = resolve_model(config.model)
    tokenizer = load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else model)
    certificate = certify(
        tokenizer, model=config.model, stop_token_ids=load_stop_token_ids(model), variables=config.chat_template_kwargs
    )
    if config.json:
        print_json(certificate.to_dict())
    else:
        sys.stdout.writelines(f"{safe(line)}\n" for line in certificate.lines())
    return certificate.exit_code


def _show(args: Sequence[str]) -> int:
    config = parse(ShowConfig, "tokens show", args)
    from agentenv.runs.records.scan import ReadReport
    from agentenv.runs.tokens.view import episode_view, load_episode, load_run_tokenizer

    report = ReadReport()
    try:
        trajectory = load_episode(config.run, config.episode, report=report)
    finally:
        if report.damage:
            sys.stderr.write(f"agentenv: {config.run}: {report.damage}\n")
    tokenizer = load_run_tokenizer(config.run, config.tokenizer)
    view = episode_view(trajectory, tokenizer, logprobs=config.logprobs, max_tokens=config.max_tokens)
    wide_console().print(view)
    return int(bool(report.damage))


def _replay(args: Sequence[str]) -> int:
    config = parse(ReplayConfig, "tokens replay", args)
    from agentenv.runs.tokens.replay import replay_run

    options = {**vars(config), "engine_args": config.engine_args or None}
    del options["run"], options["json"]
    report = asyncio.run(replay_run(config.run, **options))
    if config.json:
        print_json(report.to_dict())
    else:
        wide_console().print(report)
    return report.exit_code


_COMMANDS: Commands = {
    "certify": (summary_of(CertifyConfig), _certify),
    "show": (summary_of(ShowConfig), _show),
    "replay": (summary_of(ReplayConfig), _replay),
}
