"""Checks every configured plug-in, as the preflight check does."""

from slime.plugins import check_plugin, configured_plugins


def check_plugins(args):
    for point, path, where in configured_plugins(args):
        check_plugin(point, path, where)
