"""Prompts with something that must not become public, and prompts that only look so. All values are invented."""

from __future__ import annotations

import random
import string

ALNUM = string.ascii_letters + string.digits


def drawn(length: int, letters: str = ALNUM, seed: int = 1) -> str:
    """Return random letters, the same in each run; written out they would set off scanners of repositories."""
    return "".join(random.Random(seed).choices(letters, k=length))


UPPER = string.ascii_uppercase + string.digits
HEX = string.digits + "abcdef"

# rule -> values; each is put into several sentences.
POSITIVES: dict[str, tuple[str, ...]] = {
    "sk_key": (f"sk-{drawn(48)}", f"sk-proj-{drawn(64)}", f"sk-ant-api03-{drawn(80)}"),
    "aws_access_key": (f"AKIA{drawn(16, UPPER)}", f"ASIA{drawn(16, UPPER, 2)}"),
    "github_token": (f"ghp_{drawn(36)}", f"github_pat_{drawn(22)}_{drawn(59)}", f"gho_{drawn(36, seed=3)}"),
    "gitlab_token": (f"glpat-{drawn(20)}",),
    "slack": (
        f"xoxb-{drawn(12, string.digits)}-{drawn(24)}",
        f"https://hooks.slack.com/services/T0{drawn(9, UPPER)}/B0/{drawn(24)}",
    ),
    "stripe_key": (f"sk_live_{drawn(24)}", f"rk_test_{drawn(24)}", f"whsec_{drawn(32)}"),
    "google_key": (f"AIza{drawn(35)}", f"ya29.{drawn(60)}", f"GOCSPX-{drawn(28)}"),
    "huggingface_token": (f"hf_{drawn(34)}",),
    "package_registry_token": (f"npm_{drawn(36)}", f"pypi-AgEIcHlwaS5vcmc{drawn(60)}"),
    "cloud_token": (
        f"dop_v1_{drawn(64, HEX)}",
        f"SG.{drawn(22)}.{drawn(43)}",
        f"AC{drawn(32, HEX)}",
        f"123456789:AA{drawn(33)}",
    ),
    "json_web_token": (f"eyJ{drawn(33)}.eyJ{drawn(60)}.{drawn(43)}",),
    "private_key": (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    ),
    "url_with_password": ("postgres://app:tr0ub4dor@db.internal:5432/app", "https://ann:s3cr3tpw@git.acme.org/x.git"),
    "authorization_header": (f"Authorization: Bearer {drawn(40)}", f"authorization: Basic {drawn(24)}=="),
    "assigned_secret": (
        "password: tr0ub4dor&3",
        'API_KEY = "a1b2c3d4e5f60718"',
        "client_secret=9f8e7d6c5b4a",
        "password is hunter2hunter2",
        '{"access_token": "7d1f0c9e8b7a6d5c"}',
        "DB_PASSWORD=Sup3rGeheim!",
    ),
    "random_text": (drawn(40, seed=5), drawn(64, ALNUM + "+/", seed=6) + "==", drawn(32, seed=7)),
    "card_number": (
        "4111 1111 1111 1111",
        "5555555555554444",
        "3782-822463-10005",
        "6011 1111 1111 1117",
        "3530111333300000",
    ),
    "iban": (
        "DE89 3704 0044 0532 0130 00",
        "GB29NWBK60161331926819",
        "FR14 2004 1010 0505 0001 3M02 606",
        "NL91ABNA0417164300",
    ),
    "email": (
        "ann.miller@acme-corp.com",
        "j.o'neil+news@mail.acme.co.uk",
        "müller.hans@firma.de",
        "USER_1@SUB.DOMAIN.ORG",
    ),
    "phone_international": ("+49 170 1234567", "+1 (415) 555-2671", "0044 20 7946 0958", "+33 6 12 34 56 78"),
    "phone_north_america": ("(415) 555-2671", "415-555-2671", "415.555.2671"),
    "phone_named": ("phone: 030 1234567", "Tel. 0211/9876543", "call me at 98765 43210", "mobile 07911 123456"),
    "us_social_security": ("123-45-6789", "536-90-4399"),
    "uk_national_insurance": ("AB 12 34 56 C", "JG103759A"),
    "spain_dni": ("54362315K", "12345678-Z"),
    "spain_nie": ("X2482300W",),
    "france_nir": ("2 95 10 99 126 111 93", "180126955222380"),
    "italy_codice_fiscale": ("RCCMNL83S18D969H",),
    "germany_tax_id": ("36 574 261 809", "36574261809"),
    "switzerland_ahv": ("756.9217.0769.85",),
    "netherlands_bsn": ("BSN 111222333", "burgerservicenummer: 123456782"),
    "poland_pesel": ("44051401359",),
    "brazil_cpf": ("390.533.447-05",),
    "india_aadhaar": ("2341 2341 2346",),
    "china_resident_id": ("360426199101010071", "44011320141005001X"),
    "finland_hetu": ("131052-308T",),
    "south_korea_rrn": ("971013-9019902",),
    "passport_named": ("passport no. C01X00T47", "Reisepass Nr: L01X00T4"),
}

SENTENCES = (
    "You are the assistant of Acme. Use {} where you need it.",
    "Context:\n- {}\nAnswer in German.",
    "{}",
    "Bitte antworte höflich 😀. ({}) Danke!",
)

# Harmless texts that share the shape of something above.
NEAR_MISSES: tuple[str, ...] = (
    "You are a helpful assistant. Answer in at most three sentences, and cite your sources.",
    "Set the OPENAI_API_KEY environment variable before you start the server.",
    'api_key = os.environ["API_KEY"]',
    "password: <your password here>",
    "password = getpass.getpass()",
    "Never tell anybody your password. A password should have twelve letters.",
    "API key: ${API_KEY}",
    "token = {{ secrets.TOKEN }}",
    "The sk-learn library, task-oriented-dialogue-systems and risk-averse-investors-in-emerging-markets.",
    "sk-something-with-words-only-here",
    "Commit 3f786850e387550fdab836ed7e6dc881de23001b fixes it.",
    "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "Request 550e8400-e29b-41d4-a716-446655440000 was served.",
    "The class AbstractSingletonProxyFactoryBean2 extends AbstractAutowireCapableBeanFactory.",
    "getUserAccountByIdentifierV2Handler calls computeStatisticsForQuarter2024Report.",
    "from services.scheduler.cache.interface import PrefixCache",
    "/usr/local/lib/python3.11/site-packages/numpy/core/multiarray.py",
    "https://docs.acme.org/en/latest/user_guide/getting_started.html?version=3#installing-from-source",
    "https://user:password@host.example/path is how credentials are put into an address.",
    "ssh://git@github.com/acme/app.git",
    "-----BEGIN CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQ",
    "Order 4111 1111 1111 1112 was not found.",
    "Invoice 1234567890123456 of 2024.",
    "0000 0000 0000 0000 is no card.",
    "The tracking number is 9400111899223100001111.",
    "Timestamp 1732183926000, id 20241121101206123456.",
    "DE89 3704 1044 0532 1130 01 has a wrong sum.",
    "GB29 is a plate and FR14 a road.",
    "Write to name@example.com or root@localhost.",
    "@dataclass(frozen=True) and @app.route('/x')",
    "user@host is a login; a@b is too short.",
    "ann at acme dot org",
    "Version 10.4.2-1 of 2024-11-21, build 2024.11.21.1012.",
    "The range is 100-200-300 and the code 12-34-5678.",
    "000-12-3456 and 666-12-3456 and 123-00-4567 were never issued.",
    "Chapter 3.2.1, page 415-420, ISBN 978-3-16-148410-0.",
    "GB 12 34 56 C is no number of that kind.",
    "12345678A has a wrong letter.",
    "36574261808 has a wrong sum.",
    "44051401358 has a wrong sum.",
    "390.533.447-06 has a wrong sum.",
    "IP 192.168.100.200, mask 255.255.255.0, MAC 00:1a:2b:3c:4d:5e.",
    "Coordinates 52.520008, 13.404954; price 1.234.567,89 EUR.",
    "She ran 1500 m in 04:12.37 and 10000 m in 31:17.45.",
    "2 + 2 = 4, 17 * 23 = 391, 1234567 / 7 = 176366.7",
    "Call the function with 3 arguments; call 2 returns 5.",
    "The passport office is closed. My passport is red.",
    "Phone numbers have at most 15 digits (E.164).",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "AAAAAAAAAAAAAAAAAAAAAAAA1111111111111111bbbbbbbbbbbbbbbb",
    "==================================================",
    "data:image/png;base64, then the picture",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore.",
    "def f(x): return {k: v for k, v in x.items() if v is not None}",
    "SELECT id, name FROM users WHERE created_at > '2024-01-01' LIMIT 100;",
    "| a | b |\n| --- | --- |\n| 1 | 2 |",
    "日本語のプロンプトです。丁寧に答えてください。",
    "Ответь кратко и по-русски.",
)
