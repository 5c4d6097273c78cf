"""Signed files of a run by post: a letter with the server's requests to all institutions, and an institution's answer.

A file is safetensors, never a pickle, and has two arrays of bytes: ``content``, a second safetensors file, and its
``signature``, Ed25519 (RFC 8032) by ``cryptography``. The content has a message of :mod:`bayesfed.deploy.messages` in
each of its arrays, and plain data that say what they are. Nothing in the content is used before its signature is
checked against a key that was exchanged beforehand, but for the names by which that key is found.

A signature shows who wrote a file and that nobody changed it. It hides nothing: whoever reads a file reads what is in
it, unless it is sent encrypted, or :mod:`bayesfed.deploy.secure` masks the uploads in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from bayesfed.data.optional import import_optional
from bayesfed.deploy.bundles import as_array
from bayesfed.deploy.coding_messages import Key, Name
from bayesfed.deploy.messages import MessageError
from bayesfed.engine.files import metadata_text, to_bytes
from bayesfed.settings import Count, Strict, Times

_FILE, _HEAD = "bayesfed post", "bayesfed letter"
_CONTEXT = b"bayesfed by post\n"
"""What is signed begins with it, so that the key signs nothing else by mistake."""


class Letter(Strict):
    """The server's requests.

    Attributes:
        study: 64 random hexadecimal digits.
        number: of the letter in the study, from 1.
        requests: by institution, the positions of its messages in the file, in the order in which they are handled.
        final: true of the last letter of a study, which needs no answer.
    """

    kind: Literal["letter"] = "letter"
    study: Key
    number: Count
    requests: dict[Name, list[Times]]
    final: bool = False


class LetterAnswer(Strict):
    """An institution's answer to a letter: a message for each of its requests, in their order.

    Attributes:
        study: of the letter.
        number: of the letter.
        letter: SHA-256 of the letter's content, in hexadecimal.
        institution: the name.
    """

    kind: Literal["answer"] = "answer"
    study: Key
    number: Count
    letter: Key
    institution: Name


_ANY: TypeAdapter[Letter | LetterAnswer] = TypeAdapter(
    Annotated[Letter | LetterAnswer, Field(discriminator="kind")]
)


@dataclass(frozen=True)
class SignedFile:
    """A file as it came, of which :meth:`check` must be called first.

    Attributes:
        content: what is signed.
        signature: of the content.
        head: what the file says that it is.
        messages: the bytes of messages.
    """

    content: bytes
    signature: bytes
    head: Letter | LetterAnswer
    messages: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    def check(self, key: str, owner: str) -> None:
        """Fail unless the owner of a public key has signed this content.

        Raises:
            MessageError: the content was changed, or another key has signed it.
        """
        public = _ed25519().Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        wrong = import_optional("cryptography.exceptions", "'bayesfed[deploy]'").InvalidSignature
        try:
            public.verify(self.signature, _CONTEXT + self.content)
        except wrong:
            raise MessageError(
                f"it is not as {owner} has signed it: it was changed on its way, or signed with another key than {key}"
            ) from None

    def requests_to(self, institution: str) -> list[bytes]:
        """Return the messages of a letter to an institution, in their order."""
        assert isinstance(self.head, Letter)
        return [self.messages[i] for i in self.head.requests.get(institution, ())]


def new_signing_key() -> bytes:
    """Return a private key, 32 bytes from the operating system."""
    return bytes(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())


def public_signing_key(private: bytes) -> str:
    """Return the public half of a private key, 64 hexadecimal digits."""
    key = _ed25519().Ed25519PrivateKey.from_private_bytes(private)
    return str(key.public_key().public_bytes_raw().hex())


def _ed25519() -> Any:
    name = "cryptography.hazmat.primitives.asymmetric.ed25519"
    return import_optional(name, "'bayesfed[deploy]'")


def sign_letter(head: Letter | LetterAnswer, messages: Sequence[bytes], private: bytes) -> bytes:
    """Return a file.

    Example:
        >>> from bayesfed.deploy.letters import *
        >>> from bayesfed.deploy.messages import Hello, pack
        >>> key = new_signing_key()
        >>> head = Letter(study="0" * 64, number=1, requests={"kiel": [0]})
        >>> file = read_letter(sign_letter(head, [pack(Hello())], key))
        >>> file.check(public_signing_key(key), "the coordinator")
        >>> file.head == head, file.requests_to("kiel") == [pack(Hello())]
        (True, True)
        >>> file.check(public_signing_key(new_signing_key()), "the coordinator")
        Traceback (most recent call last):
        bayesfed.deploy.messages.MessageError: it is not as the coordinator has signed it: ...
    """
    arrays = {str(i): as_array(message) for i, message in enumerate(messages)}
    content = to_bytes(arrays, _HEAD, head.model_dump_json())
    key = _ed25519().Ed25519PrivateKey.from_private_bytes(private)
    signature = bytes(key.sign(_CONTEXT + content))
    parts = {"content": as_array(content), "signature": as_array(signature)}
    return to_bytes(parts, _FILE, "{}")


def read_letter(data: bytes) -> SignedFile:
    """Return the parts of a file, whose signature is yet to be checked.

    Raises:
        MessageError: the bytes are not such a file.
    """
    outer = _arrays(data, _FILE)
    if outer.keys() != {"content", "signature"} or len(outer["signature"]) != 64:
        raise MessageError("it is not a letter or an answer of bayesfed's")
    content = outer["content"]
    try:
        head = _ANY.validate_json(metadata_text(content, _HEAD) or "")
    except (ValidationError, ValueError, AttributeError) as error:
        raise MessageError("what it says that it is cannot be read") from error
    arrays = _arrays(content, _HEAD)
    numbers = [str(i) for i in range(len(arrays))]
    if arrays.keys() != set(numbers):
        raise MessageError("its messages are not numbered")
    if isinstance(head, Letter) and any(
        i >= len(arrays) for own in head.requests.values() for i in own
    ):
        raise MessageError("it names messages that it does not have")
    return SignedFile(content, outer["signature"], head, tuple(arrays[i] for i in numbers))


def _arrays(data: bytes, name: str) -> dict[str, bytes]:
    """Return the arrays of bytes of a safetensors file with this name in its metadata."""
    try:
        named, tensors = metadata_text(data, name), load(data)
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError, RuntimeError):
        named, tensors = None, {}
    if named is None:
        raise MessageError("it is not a letter or an answer of bayesfed's, or not a whole one")
    if any(value.dtype != torch.uint8 or value.ndim != 1 for value in tensors.values()):
        raise MessageError("its parts are not arrays of bytes")
    return {key: value.numpy().tobytes() for key, value in tensors.items()}
