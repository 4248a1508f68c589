#!/usr/bin/env bash
# The FinOps Foundation's validator of FOCUS cost files passes no file of FOCUS 1.0.
# Expected: a file with all columns of FOCUS 1.0 (June 2024) and one good row passes `--validate-version 1.0`.
# Seen: focus-validator 1.0.0 asks for columns that 1.0 does not have (InvoiceIssuer, Provider, Publisher and
#       ResourceID, which the specification names InvoiceIssuerName, ProviderName, PublisherName and ResourceId;
#       ChargeType, which it replaced by ChargeCategory), and rejects each currency, as it reads the list of them
#       from a path relative to the working folder, though the list is in the package.
#       An account's id of digits only (as Amazon's) is "not a string", because it was read as a number.
#       The exit status of a failed validation is 0.
#       With the versions of its dependencies that pip chooses today it does not start: pandera 0.17 needs an
#       older multimethod.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q focus-validator==1.0.0 multimethod==1.10
cd "$work"
"$work/venv/bin/python" - <<'PY'
import csv
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

period = {"BillingPeriodStart": "2026-11-01T00:00:00Z", "BillingPeriodEnd": "2026-12-01T00:00:00Z"}
charge = {"ChargePeriodStart": "2026-11-29T00:00:00Z", "ChargePeriodEnd": "2026-11-29T01:00:00Z"}
kind = {"ChargeCategory": "Usage", "ChargeFrequency": "Usage-Based", "ChargeDescription": "GPU time", "ChargeClass": ""}
cost = dict.fromkeys(["BilledCost", "ContractedCost", "EffectiveCost", "ListCost"], "1.25")
price = dict.fromkeys(["ContractedUnitPrice", "ListUnitPrice"], "2.5")
quantity = {"ConsumedQuantity": "0.5", "ConsumedUnit": "Hours", "PricingQuantity": "0.5", "PricingUnit": "Hours"}
names = dict.fromkeys(["InvoiceIssuerName", "ProviderName", "PublisherName"], "Example")
account = {"BillingAccountId": "123456789012", "BillingAccountName": "one", "SubAccountId": "s2", "SubAccountName": "two"}
what = {"ResourceId": "r", "ResourceName": "r", "ResourceType": "GPU", "ServiceName": "Inference"}
sku = {"ServiceCategory": "AI and Machine Learning", "SkuId": "s", "SkuPriceId": "p", "PricingCategory": "Standard"}
none = ["AvailabilityZone", "RegionId", "RegionName"]
none += ["CommitmentDiscount" + name for name in ("Category", "Id", "Name", "Status", "Type")]
row = period | charge | kind | cost | price | quantity | names | account | what | sku | dict.fromkeys(none, "")
row |= {"BillingCurrency": "USD", "Tags": json.dumps({"class": "chat"})}
assert len(row) == 43, len(row)  # the columns of FOCUS 1.0
with open("costs.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, sorted(row))
    writer.writeheader()
    writer.writerow(row)

validator = Path(sys.executable).with_name("focus-validator")
done = subprocess.run(
    [validator, "--data-file", "costs.csv", "--validate-version", "1.0"], text=True, capture_output=True
)
said = done.stdout + done.stderr
failed = {line.split()[0] for line in said.splitlines() if line.endswith("failed:")}
print("focus-validator", version("focus-validator"), done.returncode, sorted(failed))
wrong_names = {f"{name}_Required" for name in ("InvoiceIssuer", "Provider", "Publisher", "ResourceID")}
assert failed == wrong_names | {
    "BillingCurrency_IsCurrencyCode",
    "BillingAccountId_IsString",
    "SkuPriceId_Nullable",
}, said
assert done.returncode == 0 and "FileNotFoundError" in said and 'KeyError("ChargeType")' in said, said
PY
"$work/venv/bin/pip" install -q multimethod==2.0 2>"$work/said" || { cat "$work/said"; exit 1; }
if "$work/venv/bin/focus-validator" --help >"$work/said" 2>&1; then
    echo "it starts with multimethod 2.0"
    exit 1
fi
grep "ImportError: cannot import name 'overload' from 'multimethod'" "$work/said"
