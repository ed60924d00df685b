"""What one run is: :class:`ebbench.spec.run.RunSpec`, a tree of settings that are declared once each.

Command line, TOML files, ``--dry-run``, keys of stored results and tables of sweeps are derived from the declarations.
Nothing here imports numpy, pyarrow or an engine, since the shell's completion and ``--help`` import it.
"""
