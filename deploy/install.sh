#!/bin/sh
# Puts Shoal's agent (or a coordinator) on this machine as a service of systemd: a user, a virtual environment below
# /opt/shoal, settings in /etc/shoal, state in /var/lib. Guide: docs/guides/devices.md.
#
# shellcheck disable=SC2086,SC2231 # home, state, unit, with and so on are words of this script
#
# Refusals are one line on stderr, `found: ..; wanted: ..; try: .. (CODE)`, with status 1; a wrong command line ends with status 2.
set -eu
umask 022

usage() {
    cat <<'USAGE'
usage: install.sh --enrol HOST:PORT --token-file FILE [option ..]   this machine joins a region as a node
       install.sh --part coordinator --set SHOAL_REGION=NAME ..     this machine runs a region's coordinator
       install.sh --upgrade [--wheels DIR]                          another release; settings stay
       install.sh --rollback                                        the last release before it that served
       install.sh --uninstall [--purge]

  --part agent|coordinator  what this is about [default: agent]
  --enrol HOST:PORT         where the coordinator redeems tokens
  --token-file FILE         a join token, from `shoal token create`; - for standard input
  --role node|gateway       a gateway runs no model [default: node]
  --label K=V               counts as self.K, or as K where the token allows it; repeatable
  --listen ADDRESS          where requests are taken [default: 0.0.0.0]
  --set SHOAL_NAME=VALUE    any other option of `shoal-agent run`, or `shoal-coordinator run`; repeatable
  --extras LIST             what is installed with the agent: cpu, openvino, qnn, prepare, nvidia, none [default: cpu; gateway: none]
  --wheels DIR              install from these wheels alone [default: wheels/ beside this script, where it is there; else
                            the sources around it, with what others made from pip's configured index. Nothing of Shoal is
                            ever looked for in an index: a package of that name there is somebody else's]
  --python FILE             [default: python3]
  --purge                   with --uninstall: identity, models and settings too
  --no-start                put in place and enabled, not started
  --dry-run                 look, and say what would be done

Run again with other options it changes settings; what it was not told stays. Exit status: 0, 1 refused, 2 wrong usage.
USAGE
}

say() { printf '%s\n' "$*"; }
refuse() { # CODE FOUND ASKED REMEDY
    printf 'found: %s; wanted: %s; try: %s (%s)\n' "$2" "$3" "$4" "$1" >&2
    exit 1
}
one_line() {
    [ "$(printf '%s\n' "$1" | wc -l)" -eq 1 ]
}
wrong() {
    printf 'install.sh: %s (--help)\n' "$1" >&2
    exit 2
}
run() {
    if [ -n "$dry" ]; then
        say "+ $*"
    else
        "$@"
    fi
}
put() { # FILE PATH [MODE]: a copy, replaced as a whole
    if cmp -s "$1" "$2"; then return 0; fi
    changed=yes
    run install -m "${3:-644}" "$1" "$2.new"
    run mv -f "$2.new" "$2"
}

here=$(cd "$(dirname "$0")" && pwd)
facts=${SHOAL_FACTS:-} # a folder that stands for / where this script looks what machine it is on; for its tests
verb=install part=agent enrol="" token="" role="" labels="" listen="" settings="" extras="" wheels="" python=python3
purge="" start=yes dry="" changed=""

while [ $# -gt 0 ]; do
    case $1 in
    --upgrade | --rollback | --uninstall) verb=${1#--} ;;
    --purge) purge=yes ;;
    --no-start) start="" ;;
    --dry-run) dry=yes ;;
    -h | --help)
        usage
        exit 0
        ;;
    --part | --enrol | --token-file | --role | --label | --listen | --set | --extras | --wheels | --python)
        [ $# -gt 1 ] || wrong "$1 needs a value"
        case $1 in
        --part) part=$2 ;;
        --enrol) enrol=$2 ;;
        --token-file) token=$2 ;;
        --role) role=$2 ;;
        --label)
            case $2 in
            *[!A-Za-z0-9._/:+,\ =-]* | =* | *[!=]=*=* | "") refuse FIELD_INVALID "--label $2" "KEY=VALUE of letters, digits and ._/:+,- and spaces" "write it so" ;;
            *=*) labels="$labels --label '$2'" ;;
            *) refuse FIELD_INVALID "--label $2" "KEY=VALUE" "write it so" ;;
            esac
            ;;
        --listen) listen=$2 ;;
        --set)
            one_line "$2" && printf '%s' "$2" | LC_ALL=C grep -Eqx 'SHOAL_[A-Z_]+=[^"\\$`]*' ||
                refuse FIELD_INVALID "--set $2" 'SHOAL_NAME=VALUE, without quotes, \, $ and `' "see shoal-$part run --help for the names"
            settings="$settings$2
"
            ;;
        --extras) extras=$2 ;;
        --wheels) wheels=$2 ;;
        --python) python=$2 ;;
        esac
        shift
        ;;
    *) wrong "what is $1?" ;;
    esac
    shift
done

case $part in
agent) need_mb=300 need_memory_mb=480 ;;
coordinator) need_mb=350 need_memory_mb=240 ;;
*) wrong "--part agent or coordinator" ;;
esac
case $role in "" | node | gateway) ;; *) wrong "--role node or gateway" ;; esac
[ -z "$enrol$token$role$labels$listen$extras" ] || [ "$part" = agent ] || wrong "--enrol, --token-file, --role, --label, --listen and --extras are an agent's"

program=shoal-$part
distribution=shoal-orchestrator-$part
unit=$program.service
home=/opt/shoal/$part
state=/var/lib/$program
environment=/etc/shoal/$part.env
units=/etc/systemd/system
has_systemd=""
[ ! -d "$facts/run/systemd/system" ] || has_systemd=yes

# -- what machine this is ---------------------------------------------------------------------------------------------

board() { # one word
    if [ -e "$facts/etc/nv_tegra_release" ] || grep -qs 'nvidia,tegra' "$facts/proc/device-tree/compatible"; then
        say jetson
    elif grep -qs 'rockchip,' "$facts/proc/device-tree/compatible"; then
        say rockchip
    elif [ -e "$facts/proc/driver/nvidia/version" ]; then
        say nvidia
    elif [ -e "$facts/.dockerenv" ] || [ -e "$facts/run/.containerenv" ]; then
        say container
    else
        say plain
    fi
}

advise() {
    case $(board) in
    jetson)
        say "a Jetson: its processor serves models (extra cpu). Its GPU shares memory and has devices of its own (nvhost, nvmap)"
        say "  that workers are not given: not used, and not tried on such a board. JetPack 6 has Python 3.10: --python FILE with 3.11 or newer"
        ;;
    rockchip)
        say "a Rockchip board: its processor serves models (extra cpu). Its NPU takes models of another format (RKNN) and has no"
        say "  driver here; not tried on such a board. Kernels before 5.13 have no Landlock: shoal-agent doctor says so"
        ;;
    nvidia)
        say "NVIDIA's driver is here: --extras nvidia finds its devices; they serve with an ONNX Runtime that is built for CUDA"
        ;;
    container) [ -n "$has_systemd" ] || say "a container without systemd: the image shoal/$part, or the program below an init (docs/guides/devices.md)" ;;
    esac
}

check_machine() {
    [ "$(uname -s)" = Linux ] || refuse NOT_SUPPORTED_YET "$(uname -s)" "Linux" "use a Linux machine"
    machine=${SHOAL_MACHINE:-$(uname -m)}
    case $machine in
    x86_64 | aarch64) ;;
    *) refuse NOT_SUPPORTED_YET "a processor $machine" "x86_64 or aarch64" "ONNX Runtime has no wheels for others: use another machine" ;;
    esac
    memory_mb=$(($(awk '/^MemTotal:/ {print $2}' "$facts/proc/meminfo") / 1024))
    [ "$memory_mb" -ge $need_memory_mb ] ||
        refuse MEMORY_SHORT "$memory_mb MB of memory" "$need_memory_mb MB, and what models take" "use a larger machine"
}

check_python() {
    lacks=$("$python" -I -S -c '
import sys
from importlib.util import find_spec
print("version" if sys.version_info < (3, 11) else "venv" if None in map(find_spec, ("ensurepip", "venv")) else "")
' 2>/dev/null) || lacks=version
    case $lacks in
    version) refuse NOT_FOUND "$python: $("$python" --version 2>&1 || :)" "Python 3.11 or newer" "install one, and name it by --python" ;;
    venv) refuse NOT_FOUND "$python without venv" "its modules venv and ensurepip" "apt-get install python3-venv" ;;
    esac
}

free_mb() { # of the file system that PATH is on, or will be
    path=$1
    while [ ! -e "$path" ]; do path=$(dirname "$path"); done
    df -Pm "$path" | awk 'NR == 2 {print $4}'
}

check_disk() {
    free=$(free_mb $home)
    [ "$free" -ge $need_mb ] || refuse DISK_FULL "$free MB free for $home" "$need_mb MB" "free space there"
    [ "$part" = coordinator ] || [ "$(free_mb $state)" -ge 512 ] ||
        refuse DISK_FULL "$(free_mb $state) MB free for $state" "512 MB for models, 4 GiB to be at ease" "free space there"
}

check_settings() {
    [ "$part" = agent ] || return 0
    if [ -n "$enrol" ]; then
        one_line "$enrol" && printf '%s' "$enrol" | LC_ALL=C grep -Eqx '([^ :,]+:[0-9]{1,5})(,[^ :,]+:[0-9]{1,5})*' ||
            refuse FIELD_INVALID "--enrol $enrol" "HOST:PORT, several with commas" "the coordinator's --enrol address"
    fi
    case $listen in *[!A-Za-z0-9.:-]*) refuse FIELD_INVALID "--listen $listen" "an address of this machine" "0.0.0.0 for all" ;; esac
    if [ -n "$token" ] && [ "$token" != - ]; then
        [ -s "$token" ] || refuse NOT_FOUND "--token-file $token" "a file with a join token" "shoal token create --role agent --name NAME"
    fi
    [ -z "$token" ] || [ -n "$enrol" ] || refuse FIELD_MISSING "--token-file without --enrol" "--enrol HOST:PORT" "say where the coordinator redeems tokens"
    if [ -z "$token" ] && [ ! -e $state/identity/cert.pem ] && [ -n "$start" ]; then
        refuse FIELD_MISSING "this machine is no member of a region" "--enrol HOST:PORT --token-file FILE" "shoal token create --role agent --name NAME, or --no-start"
    fi
}

# -- a release: a virtual environment below $home/releases, chosen by the link $home/current ---------------------------

packages() { # what pip is asked for
    with=""
    if [ "$part" = agent ] && [ "$extras" != none ]; then with="[$extras]"; fi
    if [ -z "$wheels" ]; then
        sources=$(cd "$here/.." && pwd)
        say "--constraint $sources/constraints.txt $sources/protos"
        [ "$part" = agent ] || say "$sources/policies"
        say "$sources/$1$with"
    else
        say "$distribution$with"
    fi
}

make_release() {
    if [ -z "$wheels" ] && [ -d "$here/wheels" ]; then wheels=$here/wheels; fi
    if [ -n "$wheels" ]; then
        ls "$wheels/shoal_orchestrator_$part"-*.whl >/dev/null 2>&1 ||
            refuse NOT_FOUND "no shoal_orchestrator_$part-*.whl in $wheels" "a folder of wheels" "make bundle"
        wheels=$(cd "$wheels" && pwd)
        set -- --no-index --find-links "$wheels"
    else
        set --
    fi
    case $part in agent) folder=agents ;; *) folder=coordinator ;; esac
    [ -n "$wheels" ] || [ -e "$here/../$folder/pyproject.toml" ] ||
        refuse NOT_FOUND "neither wheels nor Shoal's sources beside $here" "what make bundle made, or the sources" "--wheels DIR (make bundle): no index has Shoal's packages"
    extras=${extras:-$(cat $home/current/.extras 2>/dev/null || :)}
    if [ -z "$extras" ]; then
        extras=cpu
        if [ "$role" = gateway ]; then extras=none; fi
    fi
    release=$home/releases/$(date -u +%Y%m%dT%H%M%SZ)
    run mkdir -p $home/releases
    run chmod 755 /opt/shoal $home $home/releases
    unfinished=$release
    trap '[ -z "$unfinished" ] || [ -n "$dry" ] || rm -rf "$unfinished"' EXIT
    run "$python" -m venv "$release"
    # shellcheck disable=SC2046 # several words
    run "$release/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check "$@" $(packages $folder) ||
        refuse FETCH_FAILED "pip did not install $program" "all wheels for this Python and processor" "--wheels DIR with all of them (make bundle), or configure pip's index"
    run "$release/bin/pip" uninstall --quiet --yes --disable-pip-version-check setuptools
    run "$release/bin/$program" run --help >/dev/null ||
        refuse RUNTIME_FAILED "$program does not start" "a release that runs" "run it by hand: $release/bin/$program run --help"
    [ -n "$dry" ] || say "$extras" >"$release/.extras"
    unfinished=""
    choose "$release" new
}

choose() { # RELEASE [new]: current from now on. The last one before it that served is kept, all others go
    before=$(readlink $home/current || :)
    kept=$(readlink $home/previous || :)
    if [ -n "$before" ] && [ "$before" != "$1" ] && [ ! -e "$before/.unproven" ]; then
        kept=$before
        run ln -sfn "$before" $home/previous
    fi
    if [ -n "${2:-}" ] && [ -n "$has_systemd" ] && [ -n "$start" ]; then
        run touch "$1/.unproven" # until it serves (start_unit)
    fi
    changed=yes
    run ln -sfn "$1" $home/current.new
    run mv -fT $home/current.new $home/current
    for each in $home/releases/*; do
        case $each in
        "$1" | "$kept" | "$home/releases/*") ;;
        *) run rm -rf "$each" ;;
        esac
    done
}

# -- the service ------------------------------------------------------------------------------------------------------

make_user() {
    id shoal >/dev/null 2>&1 ||
        run useradd --system --user-group --home-dir /var/lib/shoal --no-create-home --shell /usr/sbin/nologin shoal
}

write_settings() {
    run install -d -m 755 /etc/shoal
    new=""
    if [ "$part" = agent ]; then
        if [ -n "$listen" ] || [ ! -e $environment ]; then
            for use in LISTEN:8001 METRICS:9464 FRONT_METRICS:9465; do
                new="${new}SHOAL_${use%:*}=${listen:-0.0.0.0}:${use#*:}
"
            done
        fi
        [ -z "$enrol" ] || new="${new}SHOAL_ENROL=$enrol
SHOAL_TOKEN_FILE=$state/token
"
        [ -z "$role" ] || new="${new}SHOAL_ROLE=$role
"
        [ -z "$labels" ] || new="${new}SHOAL_ARGUMENTS=${labels# }
"
    fi
    new=$new$settings
    wanted=$(mktemp)
    {
        say "# Written by install.sh; what else is written here stays. The options of \`$program run\`, by their variables;"
        say "# SHOAL_ARGUMENTS: more words of its command line."
        # the last word counts, so what stood before goes first, but for what is said anew
        said=$(printf '%s' "$new" | sed -n 's/^\(SHOAL_[A-Z_]*\)=.*/^\1=/p')
        if [ -e $environment ]; then
            grep -v '^# \(Written by install.sh\|SHOAL_ARGUMENTS\)' $environment | if [ -n "$said" ]; then grep -v "$said" || :; else cat; fi
        fi
        printf '%s' "$new" | sed 's/^\([A-Z_]*\)=\(.*\)$/\1="\2"/'
    } >"$wanted"
    put "$wanted" $environment 600 # systemd reads it, as root; an administrator may have put a secret there
    rm -f "$wanted"
}

write_token() {
    [ -n "$token" ] || return 0
    run install -d -m 700 -o shoal -g shoal $state
    if [ -n "$dry" ]; then
        say "+ write $state/token, mode 600"
        return 0
    fi
    # By the service's user: in a folder of its own it could have root write to, and give it, what a link there names.
    # shellcheck disable=SC2016 # expanded by the inner shell
    if [ "$token" = - ]; then cat; else cat "$token"; fi |
        runuser -u shoal -- sh -c 'umask 077 && rm -f "$1.new" && cat >"$1.new" && [ -s "$1.new" ] && mv -f "$1.new" "$1"' sh $state/token ||
        refuse FIELD_INVALID "an empty token" "a join token" "shoal token create --role agent --name NAME"
    changed=yes
}

systemd_version() { systemctl --version 2>/dev/null | awk 'NR == 1 {print $2}'; }

write_unit() {
    run install -d -m 755 $units/$unit.d
    put "$here/systemd/$unit" $units/$unit
    [ "$part" = agent ] || return 0
    version=$(systemd_version)
    if [ "${version:-0}" -ge 254 ] && [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        put "$here/systemd/$unit.d/delegate.conf" $units/$unit.d/delegate.conf
    else
        say "systemd ${version:-is missing}, or control groups version 1: workers limit their memory themselves alone (hardening.md)"
    fi
    case ,$extras, in
    *,nvidia,*) put "$here/systemd/$unit.d/nvidia.conf" $units/$unit.d/nvidia.conf ;;
    esac
}

start_unit() { # again, where something changed
    if [ -z "$has_systemd" ]; then
        say "systemd does not run here: start it by $home/current/bin/$program run, with the variables in $environment"
        return 0
    fi
    run systemctl daemon-reload
    run systemctl --quiet enable $unit
    [ -n "$start" ] || return 0
    if [ -n "$changed" ]; then run systemctl restart $unit; else run systemctl start $unit; fi
    [ -z "$dry" ] || return 0
    waited=0
    while ! serves; do
        waited=$((waited + 1))
        if [ $waited -gt 300 ]; then
            why=$(journalctl --unit=$unit --lines=3 --output=cat 2>/dev/null | cut -c 1-300 | tr '\n' ' ' || :)
            refuse RUNTIME_FAILED "$unit does not serve after 60 s: $why" "a service that runs" "journalctl -u $unit; $home/current/bin/$program doctor"
        fi
        sleep 0.2
    done
    rm -f $state/token $home/current/.unproven # one use, and used; and it serves
}

serves() {
    systemctl --quiet is-active $unit || return 1
    [ "$part" = agent ] || return 0
    [ -e $state/identity/cert.pem ]
}

# -- verbs ------------------------------------------------------------------------------------------------------------

uninstall() {
    if [ -n "$has_systemd" ] && [ -e $units/$unit ]; then
        run systemctl --quiet disable --now $unit
        run systemctl kill --kill-who=all --signal=KILL $unit 2>/dev/null || : # nothing is left of it as a rule
    fi
    run rm -rf "$units/$unit" "$units/$unit.d" $home
    [ -z "$has_systemd" ] || run systemctl daemon-reload
    if [ -n "$purge" ]; then
        run rm -rf $state $environment
        if id shoal >/dev/null 2>&1 && [ ! -e /var/lib/shoal-agent ] && [ ! -e /var/lib/shoal-coordinator ]; then
            run userdel shoal
        fi
    fi
    run rmdir --ignore-fail-on-non-empty /opt/shoal /etc/shoal 2>/dev/null || :
    say "$program is gone${purge:+, with what it kept}"
    [ "$part" = coordinator ] || say "its region still knows it: shoal node revoke NAME; shoal delete node NAME"
}

rollback() {
    back=$(readlink $home/previous || :)
    [ -d "$back" ] || refuse NOT_FOUND "no release before the present one" "a release that --upgrade left" "install.sh --upgrade --wheels DIR with the older wheels"
    choose "$back"
    start_unit
    say "$program: $back"
}

install_part() {
    check_machine
    check_python
    advise
    check_settings
    if [ "$verb" = upgrade ] && [ ! -e $home/current ]; then
        refuse NOT_FOUND "$program is not installed" "an installation" "install.sh without --upgrade"
    fi
    if [ "$verb" = install ] && [ -e $home/current ]; then
        say "$program is installed: settings only (--upgrade for another release)"
    else
        check_disk
        make_release
    fi
    make_user
    write_settings
    write_token
    write_unit
    start_unit
    say "$program: ${dry:+would be }in $home${has_systemd:+, as $unit}"
}

[ -n "$dry" ] || [ "$(id -u)" = 0 ] || refuse ROLE_DENIED "user $(id -un)" "root" "sudo $0 .."
case $verb in
install | upgrade) install_part ;;
rollback) rollback ;;
uninstall) uninstall ;;
esac
