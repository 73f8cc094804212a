"""The driver's errors in perdure's words: what, where, and how to mend it."""

from __future__ import annotations

import re

from perdure.errors import StoreUnavailableError

__all__ = ["missing_bucket", "trouble"]

_STATUS = re.compile(r"non-2xx status code: (\d{3})|\bstatus: (\d{3})\b")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"\bkind: (Connect|Timeout|Request|Interrupted|Decode|Unknown)\b")

_CURES = {
    "NoSuchBucket": "there is no such bucket: make it, or correct the URL",
    "InvalidAccessKeyId": "the access key is not known there: look at AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret does not fit the access key: look at "
    "AWS_SECRET_ACCESS_KEY, and at the region",
    "AccessDenied": "the credentials do not permit this: allow s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:ListBucket",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's: set it (chronyd, "
    "ntpd)",
    "ExpiredToken": "the credentials have expired: renew them",
    "AuthorizationHeaderMalformed": "the region is another one: give region=… in the URL",
    "PermanentRedirect": "the bucket lies in another region: give region=… in the URL",
    "SlowDown": "the service limits requests; saving goes on by itself",
    "InvalidDigest": "the request was damaged on its way",
}
_BY_STATUS = {
    "401": "the credentials are refused: look at the AWS_… variables",
    "403": "the credentials do not permit this: look at the AWS_… variables and the policy",
    "404": "it is not there: look at the bucket's name and the endpoint",
    "429": "the service limits requests; saving goes on by itself",
    "503": "the service is busy or down; saving goes on by itself",
}

_UNWRITTEN = frozenset({"301", "307", "400", "401", "403", "404", "405", "411", "429", "503"})
"""Refusals: nothing was written. Any other answer leaves it open."""

_LONG = 200


def missing_bucket(error: Exception) -> bool:
    """Say whether an object is missing because its bucket is."""
    return "NoSuchBucket" in str(error)


def trouble(error: Exception, doing: str, where: str) -> StoreUnavailableError:
    """Return what to raise for *error*; its fact ``unwritten`` says that nothing was written."""
    text = str(error)
    status, code, kind = _found(_STATUS, text), _found(_CODE, text), _found(_KIND, text)
    refused = kind == "Connect"
    if code in _CURES or status in _BY_STATUS:
        why = _CURES.get(code) or _BY_STATUS[status]
    elif "Received redirect" in text:
        why, code = _CURES["PermanentRedirect"], "PermanentRedirect"
    elif refused:
        why = "nobody answers there: look at the endpoint, and whether the service runs"
    elif kind == "Timeout":
        why = "no answer in time: look at the network and the service; saving goes on by itself"
    elif "metadata" in text or "169.254." in text or "credential" in text.lower():
        why = "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    else:
        why = f"{text.partition(chr(10))[0][:_LONG]}"
    said = f" ({f'{status} {code}'.strip()})" if status or code else ""
    return StoreUnavailableError(
        f"cannot {doing} {where}{said}: {why}",
        path=where,
        status=int(status) if status else None,
        code=code,
        unwritten=refused
        or code == "PermanentRedirect"
        or (status in _UNWRITTEN and code != "RequestTimeout"),
    )


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""
