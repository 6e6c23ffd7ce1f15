"""Runs one target of fuzz_targets.py under a fuzzer: ``python tests/fuzz.py TARGET [--seconds N]``.

Needs atheris, which is libFuzzer for Python: it is guided by which lines of pystale an input reaches. Compiled code is
not seen by it, but is watched by AddressSanitizer if that is how pystale was built. An editable install is not seen
either. Starts from the inputs that are kept; prints the first one that fails, in base64, and exits with another status
than 0. Keep that input, under ``fixtures/fuzz``, when the fault is mended.
"""

import argparse
import sys
import tempfile
import warnings

import atheris

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Not the reference, which is slow enough, and whose paths say nothing of ours.
    with atheris.instrument_imports(include=["pystale", "fuzz_targets"], exclude=["pystale._reference"]):
        from fuzz_targets import CORPUS, TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one target under a fuzzer.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--new", metavar="DIR", help="where inputs go that reach what no other does; default: nowhere")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            *(sys.argv[0], options.new or scratch, str(CORPUS / options.target)),
            *(f"-max_total_time={options.seconds}", f"-artifact_prefix={scratch}/"),
            *("-max_len=8192", "-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1"),
        ]
        atheris.Setup(arguments, TARGETS[options.target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
