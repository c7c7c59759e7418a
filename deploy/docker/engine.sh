#!/bin/sh
# usage: engine.sh ENGINE VERSION FOLDER   lets workers find the server that an image has: FOLDER/ENGINE/bin/python.
#
# It is a wrapper and no link, since the image's Python may itself be of a virtual environment.
set -eu
engine=$1 version=$2 folder=$3
python=$(command -v "${PYTHON:-python3}")
mkdir -p "$folder/$engine/bin"
printf '#!/bin/sh\nexec %s "$@"\n' "$python" > "$folder/$engine/bin/python"
chmod 755 "$folder/$engine/bin/python"
found=$("$folder/$engine/bin/python" -c "from importlib.metadata import version; print(version('$engine'))")
case $found in
"$version" | "$version"+* | "$version".*) ;;
*) echo "engine.sh: the image has $engine $found, and $version is wanted" >&2; exit 1 ;;
esac
