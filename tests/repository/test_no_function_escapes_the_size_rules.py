"""tools/lint.py looks for functions among statements alone: here is one in each place."""

from __future__ import annotations

import ast

import lint

SOURCE = """
def plain():
    async def inside(): pass
class Holder:
    async def method(self):
        if self:
            def in_if(): pass
        else:
            def in_else(): pass
for _ in ():
    def in_for(): pass
else:
    def after_for(): pass
while False:
    def in_while(): pass
with open(""):
    def in_with(): pass
try:
    def in_try(): pass
except OSError:
    def in_except(): pass
else:
    def after_try(): pass
finally:
    def in_finally(): pass
match 1:
    case 1:
        def in_case(): pass
"""


def test_a_function_is_found_wherever_a_statement_may_stand() -> None:
    tree = ast.parse(SOURCE)
    found = [function.name for function in lint.functions(tree)]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    everywhere = [node.name for node in ast.walk(tree) if isinstance(node, kinds)]
    assert sorted(found) == sorted(everywhere)
    assert len(found) == 14
