#!/usr/bin/env bash
# Runs a command as on a machine without the packages of system_packages.sh, and ends as it does:
#
#     bash tests/without_packages.sh make test
#
# Those that are installed are hidden: in a mount namespace of its own, an overlay over /usr lacks their files. So CI sees on any machine
# whether a test fails for want of a package, where it should be skipped. What cannot be hidden (no root, no overlayfs) stays, after a warning.
set -euo pipefail
# shellcheck disable=SC2046 (a list of packages)
installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $(bash "$(dirname "$0")/system_packages.sh" --list) 2>/dev/null | sed -n 's/^installed //p') || true
warning="WARNING: nothing can be mounted over /usr (not root? no overlayfs?), so this runs WITH the packages of tests/system_packages.sh:"

if [ "$1" != --in-namespace ]; then
    [ -z "$installed" ] && exec "$@"
    # an overlay would hide what is mounted there, a container's driver for example
    ! cut -d" " -f5 /proc/self/mountinfo | grep -q "^/usr/" && unshare -m true && exec unshare -m bash "$0" --in-namespace "$@"
    echo "$warning $*" >&2
    exec "$@"
fi

shift
layers=$(mktemp -d)
if mount -t tmpfs tmpfs "$layers" && mkdir "$layers/upper" "$layers/work" &&
    mount -t overlay overlay -o "lowerdir=/usr,upperdir=$layers/upper,workdir=$layers/work" /usr; then
    # shellcheck disable=SC2086 (a list of packages)
    dpkg -L $installed | sed -E 's#^/(s?bin|lib[0-9]*)/#/usr/\1/#' | grep '^/usr/' | LC_ALL=C sort -ru >"$layers/paths"
    files=()
    folders=() # each after those that lie in it
    while read -r path; do
        if [ -d "$path" ] && [ ! -L "$path" ]; then folders+=("$path"); else files+=("$path"); fi
    done <"$layers/paths"
    printf '%s\0' "${files[@]}" | xargs -0 rm -f # they are more than a command line holds
    printf '%s\0' "${folders[@]}" | xargs -0 rmdir --ignore-fail-on-non-empty
else
    echo "$warning $*" >&2
fi
umount --lazy "$layers" || true # the overlay keeps what it needs
rmdir "$layers"
exec "$@"
