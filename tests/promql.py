"""Which series an expression of PromQL asks for, by Prometheus' own grammar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser as promql

Asked = tuple[str, set[str]]
"""Name of a series, and the labels of it that the expression needs."""


def metrics_in(expression: Any, outer: frozenset[str] = frozenset()) -> Iterator[Asked]:
    """Every series with its labels; ``outer`` must survive, as something around groups by them."""
    kind = type(expression)
    if kind is promql.VectorSelector:
        matched = {matcher.name for matcher in expression.matchers.matchers}
        yield expression.name, matched | outer
    elif kind is promql.MatrixSelector:
        yield from metrics_in(expression.vector_selector, outer)
    elif kind is promql.SubqueryExpr or kind is promql.ParenExpr or kind is promql.UnaryExpr:
        yield from metrics_in(expression.expr, outer)
    elif kind is promql.AggregateExpr:
        kept = frozenset(expression.modifier.labels) if expression.modifier else frozenset()
        yield from metrics_in(expression.expr, kept)
    elif kind is promql.Call:
        for argument in expression.args:
            yield from metrics_in(argument, outer)
    elif kind is promql.BinaryExpr:
        yield from metrics_in(expression.lhs, outer)
        yield from metrics_in(expression.rhs, outer)
    else:
        assert kind in (promql.NumberLiteral, promql.StringLiteral), kind
