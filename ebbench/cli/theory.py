"""``ebbench theory``: evaluates the formulas behind the schedulers for given numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.process.command_line import Command, Group

app = typer.Typer(
    cls=Group,
    name="theory",
    help="Evaluate the papers' formulas: threshold, memory-safe batch, EB/MB crossover, deferred prefill.",
    no_args_is_help=True,
    add_completion=False,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
P0 = Annotated[float, typer.Option("--p0", help="Completion hazard per output token (1/mean when geometric).")]
AlphaP = Annotated[float, typer.Option("--alpha-p", help="Fixed cost of a prefill step, s.")]
AlphaD = Annotated[float, typer.Option("--alpha-d", help="Fixed cost of a decode step, s.")]
MuL = Annotated[float, typer.Option("--mu-l", help="Mean prompt length, tokens.")]


@app.command(cls=Command)
def threshold(
    p0: P0,
    alpha_p: AlphaP,
    alpha_d: AlphaD,
    eta: Annotated[float, typer.Option("--eta", help="Growth of the hazard per token.")] = 0.0,
    beta_d: Annotated[float | None, typer.Option("--beta-d", help="Decode cost per sequence, s.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="N, slots.")] = None,
    discrete: Annotated[bool, typer.Option("--discrete", help="Use the exact discrete-time hazard -ln(1-p0).")] = False,
    uncapped: Annotated[bool, typer.Option("--uncapped", help="Do not limit delta_theta to 5*theta0.")] = False,
    as_json: Json = False,
) -> None:
    """Optimal switching threshold (Zhang et al. 2026, Prop. 3.1 and Thm 3.2).

    Example: ebbench theory threshold --p0 0.0036 --alpha-p 0.0047 --alpha-d 0.0104
    """
    from ebbench.advice.formulas import show, threshold_values

    values = threshold_values(
        p0, alpha_p, alpha_d, eta=eta, beta_d=beta_d, batch_size=batch_size, discrete=discrete, uncapped=uncapped
    )
    show("Switching threshold", values, as_json)


@app.command(cls=Command)
def memory(
    capacity: Annotated[float, typer.Option("--capacity", help="KV cache, tokens.")],
    mu_l: MuL,
    p0: P0,
    theta: Annotated[float, typer.Option("--theta", help="Switching threshold, share of N.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="Allowed probability of overflow.")] = 0.01,
    form: Annotated[str, typer.Option("--form", help="Formula of n_star: code or paper.")] = "code",
    as_json: Json = False,
) -> None:
    """Batch size that is safe for the KV cache (Prop. 3.3, appendix D.5).

    Example: ebbench theory memory --capacity 400000 --mu-l 105 --p0 0.0036 --theta 0.2
    """
    from ebbench.advice.formulas import memory_values, show

    show("Memory-safe batch", memory_values(capacity, mu_l, p0, theta, epsilon, form), as_json)


@app.command(cls=Command)
def crossover(
    mu_l: MuL,
    mu_o: Annotated[float, typer.Option("--mu-o", help="Mean output length, tokens.")],
    n_obs: Annotated[float, typer.Option("--n-obs", help="Active sequences.")],
    alpha_p: Annotated[float | None, typer.Option(help="Fixed cost of a prefill step, s.")] = None,
    beta_p: Annotated[float | None, typer.Option(help="Prefill, s/token.")] = None,
    alpha_d: Annotated[float | None, typer.Option(help="Fixed cost of a decode step, s.")] = None,
    beta_d: Annotated[float | None, typer.Option(help="Decode, s/sequence.")] = None,
    alpha_mb: Annotated[float | None, typer.Option(help="Fixed cost of a mixed step, s (default: alpha-p).")] = None,
    beta_mb: Annotated[float | None, typer.Option(help="Mixed step, s/token, at this decode share.")] = None,
    theta0: Annotated[float | None, typer.Option(help="Threshold, share of N (default: optimal at p0).")] = None,
    p0: Annotated[float | None, typer.Option(help="Completion hazard (default: 1/mu-o).")] = None,
    margin: Annotated[float | None, typer.Option(help="Priority margin, s/token (default: the device's).")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Calibration JSON with the costs.")] = None,
    device: Annotated[str | None, typer.Option(help="Device with the costs, with --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Model with the costs, with --device.")] = None,
    as_json: Json = False,
) -> None:
    """Exclusive or mixed batching? Both sides of Prop. 3.4. Costs given as options replace those of the device.

    Example: ebbench theory crossover --device rtx-pro-6000 --model qwen3-8b --mu-l 105 --mu-o 280 --n-obs 512
    """
    from ebbench.advice.formulas import crossover_values, known_costs, show

    given = {"alpha_p": alpha_p, "beta_p": beta_p, "alpha_d": alpha_d, "beta_d": beta_d}
    given |= {"alpha_mb": alpha_mb, "margin": margin}
    costs = known_costs(calibration, device, model)
    values = crossover_values(given, beta_mb, costs, mu_l=mu_l, mu_o=mu_o, n_obs=n_obs, theta0=theta0, p0=p0)
    show("EB/MB crossover", values, as_json)


@app.command(cls=Command)
def deferred(
    batch_limit: Annotated[int, typer.Option("--batch-limit", "--c", help="C, requests in the batch.")],
    alpha: Annotated[float, typer.Option("--alpha", help="Probability that a request ends at a token.")],
    c_p: Annotated[float, typer.Option("--c-p", help="Fixed cost of a prefill, s.")],
    c_d: Annotated[float, typer.Option("--c-d", help="Fixed cost of a decode iteration, s.")],
    t_d: Annotated[float, typer.Option("--t-d", help="Decode cost per request, s.")] = 0.0,
    t_p: Annotated[float, typer.Option("--t-p", help="Time to prefill --n tokens, s.")] = 0.0,
    d0: Annotated[float, typer.Option("--d0", help="Prompt length, tokens.")] = 0.0,
    n: Annotated[float, typer.Option("--n", help="Tokens prefilled in parallel in --t-p.")] = 1.0,
    k: Annotated[int | None, typer.Option("--k", help="Also show this threshold.")] = None,
    as_json: Json = False,
) -> None:
    """Best fixed departure threshold K (Mohanty et al. 2025): the exact chain, and the paper's approximation.

    Example: ebbench theory deferred --batch-limit 331 --alpha 0.004975 --c-p 0.028 --c-d 0.04
    """
    from ebbench.advice.formulas import deferred_values, show

    show("Deferred prefill", deferred_values(batch_limit, alpha, c_p, c_d, t_d=t_d, t_p=t_p, d0=d0, n=n, k=k), as_json)
