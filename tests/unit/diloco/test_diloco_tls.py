"""A worker and its server over TLS, with certificates made for the test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.callbacks import DiLoCoCallback
from headway.cli.main import main
from headway.diloco import DiLoCoClient, DiLoCoServer
from headway.diloco.faults import NotAllowed, Unreachable
from headway.errors import ConfigError
from headway.testing import tiny_trainer
from headway.testing.diloco import serving

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Makes a certificate that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str, address: str = "IP:127.0.0.1", *more: str) -> Pair:
        certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
        made = subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-keyout", key, "-out", certificate, "-days", "2", "-subj", f"/CN={name}",
             "-addext", f"subjectAltName={address}", *(more or ("-nodes",))],
            capture_output=True,
        )  # fmt: skip
        if made.returncode:
            pytest.skip("openssl is not there")
        return str(certificate), str(key)

    return make


@pytest.fixture(scope="module")
def own(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair("kite")


@pytest.fixture(scope="module")
def other(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair("crow")


def secure(folder: Path, pair: Pair, **options: Any) -> Any:
    return serving(folder, tls_cert=pair[0], tls_key=pair[1], **options)


def test_a_run_trains_over_tls_and_ends_with_the_servers_parameters(
    tmp_path: Path, own: Pair
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("t" * 40)
    token_file.chmod(0o600)
    with secure(tmp_path / "server", own, disable_auth=False, token="t" * 40) as server:
        assert server.is_secure
        callback = DiLoCoCallback(
            f"https://{server.address}", sync_every=2, token_file=str(token_file), tls_ca=own[0]
        )
        trainer = tiny_trainer(tmp_path, [callback], max_steps=4)
        trainer.train()
        assert server.core.totals.num_rounds == 2
        parameters = server.core.state.parameters
    own_parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(own_parameters[name], value) for name, value in parameters.items())


@pytest.mark.parametrize("case", ["another", "the system's"])
def test_a_certificate_that_is_not_trusted_ends_the_run_before_it_trains(
    tmp_path: Path, own: Pair, other: Pair, case: str
) -> None:
    tls_ca = other[0] if case == "another" else None
    with secure(tmp_path / "server", own) as server:
        # No attempt mends it: it is told at once.
        callback = DiLoCoCallback(f"https://{server.address}", tls_ca=tls_ca, first_retry_s=60)
        trainer = tiny_trainer(tmp_path, [callback], max_steps=4)
        with pytest.raises(ConfigError, match=r"its certificate is not trusted: self.signed"):
            trainer.train()
        assert not server.core.book.workers
    assert trainer.state.global_step == 0


def test_a_certificate_of_another_name_is_refused(
    tmp_path: Path, make_pair: Callable[..., Pair]
) -> None:
    elsewhere = make_pair("elsewhere", "DNS:kite.example")
    with secure(tmp_path / "server", elsewhere) as server:
        client = DiLoCoClient(server.address, tls_ca=elsewhere[0])
        with pytest.raises(NotAllowed, match=r"not trusted: IP address mismatch.*127\.0\.0\.1"):
            client.status()


def test_the_command_ends_with_2_and_says_why(
    tmp_path: Path, own: Pair, other: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    with secure(tmp_path / "server", own) as server:
        address = f"https://{server.address}"
        assert main(["diloco", "status", address, "--tls-ca", own[0]]) == 0
        assert main(["diloco", "status", address, "--tls-ca", other[0]]) == 2
        assert "its certificate is not trusted" in capsys.readouterr().err
        assert main(["diloco", "status", address, "--tls-ca", str(tmp_path / "none.pem")]) == 2
        assert "cannot be read as a file of certificates" in capsys.readouterr().err


def test_one_that_speaks_tls_and_one_that_does_not_are_told_of_it(
    tmp_path: Path, own: Pair
) -> None:
    told = pytest.raises(Unreachable, match="its address begins with https://")
    with secure(tmp_path / "secure", own) as server, told:
        DiLoCoClient(server.address).status()
    told = pytest.raises(Unreachable, match="it does not speak TLS")
    with serving(tmp_path / "plain") as server, told:
        DiLoCoClient(f"https://{server.address}", tls_ca=own[0]).status()


def test_files_that_do_not_fit_are_refused_before_it_listens(
    tmp_path: Path, own: Pair, other: Pair, make_pair: Callable[..., Pair]
) -> None:
    locked = make_pair("locked", "IP:127.0.0.1", "-passout", "pass:secret")
    for certificate, key in (
        (own[0], other[1]),
        (own[1], own[1]),
        ("none.pem", own[1]),
        locked,  # nobody is there to be asked for the passphrase
    ):
        with pytest.raises(ConfigError, match=r"tls_cert=.*not a certificate and its key"):
            DiLoCoServer(
                output_dir=tmp_path / "run", num_workers=1, tls_cert=certificate, tls_key=key
            )
    assert not (tmp_path / "run").exists()
