"""A whole cluster: control plane, real node, our images, the chart."""

from __future__ import annotations

import shutil
from pathlib import Path

from baton_cluster.control_plane import ControlPlane, Layout
from baton_cluster.host import node_address
from baton_cluster.images import OPERATOR, WORKER, ImageBuilder
from baton_cluster.installation import install_chart
from baton_cluster.node import Node, node_folder, stop_node
from baton_cluster.preflight import require_machine
from baton_cluster.processes import Processes
from baton_cluster.programs import ALL, programs

REPOSITORY = Path(__file__).resolve().parents[3]
SYSTEM = "baton-system"


def node_images() -> list[Path]:
    """Return the archives of a node's images, building those whose content changed."""
    builder = ImageBuilder(REPOSITORY)
    return [builder.pause(), builder.archive(OPERATOR), builder.archive(WORKER)]


class Cluster:
    """Starts and stops everything; images and programs are made when they are not ready."""

    def __init__(self, folder: Path, *, is_detached: bool = False) -> None:
        """Prepare; start nothing.

        Raises:
            MachineError: this machine cannot run a node.
        """
        require_machine()
        self.programs = programs(ALL)
        self._archives = node_images()
        layout = Layout(folder, node_address(), is_detached)
        self.plane = ControlPlane(self.programs, layout)
        self.node = Node(self.plane, self.programs)

    def start(self) -> None:
        """Start the cluster and install the chart; return when the operator is ready."""
        self.start_bare()
        self.install()

    def install(self, *values: str) -> None:
        """Install the chart with our image and these values; return when the operator is ready."""
        image = ("image.repository=localhost/baton-operator", "image.tag=dev")
        chart = REPOSITORY / "charts" / "baton"
        install_chart(
            self.programs["helm"], self.plane.kubectl, chart, SYSTEM, *image, *values, wait=True
        )

    def start_bare(self) -> None:
        """Start the cluster with our images in it and nothing installed."""
        self.plane.start()
        self.node.start(self._archives)

    def stop(self) -> None:
        """Stop everything and remove every trace."""
        self.node.stop()
        self.plane.stop()

    def bin_folder(self) -> Path:
        """Return a folder with kubectl and helm."""
        folder = self.plane.folder / "bin"
        folder.mkdir(exist_ok=True)
        for name in ("kubectl", "helm"):
            (folder / name).symlink_to(self.programs[name])
        return folder


def stop_from_before(folder: Path) -> None:
    """Stop a detached cluster that an earlier command started."""
    processes = Processes.detached_before(folder / "logs")
    stop_node(processes, node_folder(folder), programs(("ctr",)))
    processes.stop_all()
    shutil.rmtree(folder)
