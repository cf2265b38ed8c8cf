# make runs this before it installs anything. It prints one line for the first thing that the machine lacks.
#   preflight.sh PYTHON GIGABYTES VENV
python=$1 needed=$2 venv=$3
fail() { echo "torch_xla_donate: $*" >&2; exit 1; }

[ -n "$python" ] || fail "no Python found; install Python 3.11, or name one: make PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
  fail "$("$python" --version) has no torch_xla 2.9 wheel (3.10 to 3.13 have one); name another: make PYTHON=/path/to/python3.11"
"$python" -c 'import platform, sys; sys.exit(platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"))' ||
  fail "torch_xla has wheels for Linux on x86-64 and aarch64 only; this is $(uname -sm)"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python cannot make virtual environments; install its venv package (Debian: python3-venv)"
[ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ] ||
  fail "$python has no headers (Python.h); install its development package (Debian: python3-dev)"
command -v "${CXX:-g++}" > /dev/null || fail "no C++ compiler (${CXX:-g++}); install g++"
if [ ! -d "$venv/lib" ]; then
  free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
  [ "$free" -ge "$needed" ] || fail "$free GB free in $PWD, $needed GB needed for torch and its CUDA libraries"
fi
