"""Admission policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.scheduling.admission.base import AdmissionPolicy, Promises
from sluice.scheduling.admission.moore_hodgson import MooreHodgson
from sluice.scheduling.admission.pab import PABAdmission
from sluice.scheduling.admission.slos_serve import VirtualReplica
from sluice.scheduling.policy import Registry

__all__ = ["POLICIES", "AdmissionPolicy", "Promises", "make_policy"]

POLICIES: Registry[AdmissionPolicy] = Registry(
    "admission",
    AdmissionPolicy,
    (MooreHodgson, PABAdmission, VirtualReplica),
)


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> AdmissionPolicy:
    """Build the admission policy called ``name`` with its options.

    Raises:
        ValueError: no such policy, or an option that is unknown or out of range.
    """
    return POLICIES.make(name, options)
