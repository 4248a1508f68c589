"""Admission policies by name. Adding one: its file, one line here, its test."""

from __future__ import annotations

from sluice.scheduling.admission.base import AdmissionPolicy, Promises
from sluice.scheduling.admission.moore_hodgson import MooreHodgson
from sluice.scheduling.admission.pab import PABAdmission
from sluice.scheduling.admission.slos_serve.policy import SLOsServeAdmission
from sluice.scheduling.policy import Registry

__all__ = ["POLICIES", "AdmissionPolicy", "Promises", "make_policy"]

POLICIES: Registry[AdmissionPolicy] = Registry(
    "admission",
    AdmissionPolicy,
    (MooreHodgson, PABAdmission, SLOsServeAdmission),
)

make_policy = POLICIES.make
