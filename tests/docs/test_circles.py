"""No two modules import each other, inside functions and for types included: one idea was split in two then."""

from __future__ import annotations

import grimp


def test_no_two_modules_import_each_other() -> None:
    graph = grimp.build_graph("ebbench", "vllm_eb", cache_dir=None)
    both = {
        tuple(sorted((module, imported)))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if module in graph.find_modules_directly_imported_by(imported)
    }
    assert both == set()
