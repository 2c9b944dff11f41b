#!/bin/sh
# A real Ceph object gateway on loopback, for CKPT_TEST_S3 (needs radosgw ceph-mon ceph-osd):
#   eval "$(sh tests/stores/ceph.sh start DIR PORT)" && pytest tests/stores; sh tests/stores/ceph.sh stop DIR
set -eu
action=$1 dir=$2
if [ "$action" = stop ]; then
    for daemon in client.rgw osd.0 mon.a; do
        kill "$(cat "$dir/run/$daemon.pid")" 2>/dev/null || true
    done
    exit 0
fi
port=$3 monitor=$(($3 + 20000)) key=ckpt-test-key secret=ckpt-test-secret
mkdir -p "$dir/mon" "$dir/osd" "$dir/rgw" "$dir/run" "$dir/log"
cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon_host = [v2:127.0.0.1:$monitor,v1:127.0.0.1:$((monitor + 1))]
mon_initial_members = a
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
keyring = $dir/keyring
run_dir = $dir/run
pid_file = $dir/run/\$name.pid
admin_socket = $dir/run/\$name.asok
log_file = $dir/log/\$name.log
mon_data = $dir/mon
osd_data = $dir/osd
rgw_data = $dir/rgw
rgw_frontends = beast endpoint=127.0.0.1:$port
mon_data_avail_warn = 2
mon_data_avail_crit = 1
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_memory_target = 939524096
bluestore_block_size = 10737418240
bluestore_block_create = true
CONF
export CEPH_CONF="$dir/ceph.conf"
{
    rm -f "$dir/keyring"
    ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
    for name in client.admin client.rgw osd.0; do
        ceph-authtool "$dir/keyring" --gen-key -n $name --cap mon 'allow *' --cap osd 'allow *'
    done
    id=$(sed -n 's/^fsid = //p' "$CEPH_CONF")
    monmaptool --create --clobber --fsid "$id" \
        --addv a "[v2:127.0.0.1:$monitor,v1:127.0.0.1:$((monitor + 1))]" "$dir/monmap"
    ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
    ceph-mon -i a
    disk=$(cat /proc/sys/kernel/random/uuid)
    timeout 60 ceph osd new "$disk" 0
    ceph-osd -i 0 --mkfs --osd-uuid "$disk"
    ceph-osd -i 0
    radosgw -n client.rgw
    radosgw-admin -n client.rgw user create --uid=ckpt --display-name=ckpt \
        --access-key=$key --secret-key=$secret
} >"$dir/log/start.log" 2>&1 </dev/null || { tail -5 "$dir/log/start.log" >&2; exit 1; }
tries=0
until curl -s -o /dev/null "http://127.0.0.1:$port/"; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || { echo "the gateway does not answer; see $dir/log" >&2; exit 1; }
    sleep 0.1
done
echo "export CKPT_TEST_S3=http://127.0.0.1:$port,$key,$secret"
