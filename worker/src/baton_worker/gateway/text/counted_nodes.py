"""What is put into a parsed template so that its work is counted: see `sandbox`.

A loop begins each turn with a count; what the sandbox cannot intercept (`~`, slices, comparisons of
values, captured text) becomes a call of the environment's. Knows no budget.
"""

from __future__ import annotations

from typing import Any, Final

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

_LONG_COMPARISONS: Final = frozenset({"eq", "ne", "in", "notin", "lt", "lteq", "gt", "gteq"})


class Counted(NodeTransformer):
    """Rewrites a template's tree."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count a turn, also one that the loop's condition leaves out."""
        constant = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        turn = self._call(node, "count_turn", nodes.Const(constant))
        node.body.insert(0, self._own(nodes.ExprStmt(turn), node))
        if node.test is not None:
            skipped = self._call(node, "count_turn", nodes.Const(0))
            node.test = self._own(nodes.And(skipped, node.test), node)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """Count text that is captured."""
        self.generic_visit(node)
        node.filter = self._own(nodes.Filter(node.filter, "counted", [], [], None, None), node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Join by a call."""
        self.generic_visit(node)
        return self._call(node, "joined", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Slice by a call."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [node.arg.start, node.arg.stop, node.arg.step]
        given = [nodes.Const(None) if bound is None else bound for bound in bounds]
        return self._call(node, "part", node.node, *given)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Count what is compared, unless one side is a constant: then it is short."""
        self.generic_visit(node)
        if len(node.ops) == 1 and node.ops[0].op in ("eq", "ne"):
            return self._counted_equality(node, node.ops[0])
        for operand in node.ops:
            if operand.op in _LONG_COMPARISONS and not isinstance(operand.expr, nodes.Const):
                operand.expr = self._call(node, "count_shown", operand.expr)
        return node

    def _counted_equality(self, node: nodes.Compare, operand: nodes.Operand) -> nodes.Node:
        if isinstance(node.expr, nodes.Const) or isinstance(operand.expr, nodes.Const):
            return node
        equal = self._call(node, "equal", node.expr, operand.expr)
        return equal if operand.op == "eq" else self._own(nodes.Not(equal), node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Count what a new list holds: one that holds another twice is twice as large."""
        return self._counted_literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Count what a new tuple holds."""
        return self._counted_literal(node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Count what a new mapping holds."""
        return self._counted_literal(node)

    def _counted_literal(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(part, nodes.Const | nodes.Pair) for part in node.iter_child_nodes()):
            pairs = [part for part in node.iter_child_nodes() if isinstance(part, nodes.Pair)]
            if all(isinstance(pair.value, nodes.Const) for pair in pairs):
                return node
        return self._call(node, "count_shown", node)

    def _call(self, at: nodes.Node, name: str, *given: nodes.Expr) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name)
        call: nodes.Call = self._own(nodes.Call(function, list(given), [], None, None), at)
        return call

    def _own(self, node: Any, at: nodes.Node) -> Any:
        return node.set_lineno(at.lineno).set_environment(self._environment)
